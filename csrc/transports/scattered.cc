#include "transports/scattered.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/left_out.h"

namespace telegrad {
namespace {

constexpr std::uint64_t kFarAhead = 1024;       // limit for fragments before their frames: in messages,
constexpr std::uint64_t kMostEarly = 64 << 20;  // and in bytes; lanes are paused before they reach it

std::uint64_t on_the_wire(const Block& piece) { return sizeof(FrameHeader) + sizeof(SegmentHeader) + piece.size(); }

/// Allocates memory for received bytes; if there is none, they are discarded.
BlockPtr memory_or_none(std::uint64_t size, Inbox& inbox) {
  try {
    return inbox.allocate(size);
  } catch (const std::bad_alloc&) {
    return std::make_unique<Discarded>(size);
  }
}

/// Place of a fragment within its message, which owns the memory.
class Place final : public Block {
 public:
  Place(std::byte* data, std::size_t size) : Block(data, size) {}
};

}  // namespace

BlockPtr Scattered::borrow(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) {
  if (frame.type == FrameType::kPiece) return place_of_piece(frame, segment, inbox);
  if (segment.lease != kScattered || missing_ > limits_.message + kUnderWay) return nullptr;
  if (!beginning_) {
    beginning_ = std::make_unique<Pending>();
    beginning_->number = next_++;
  }
  BlockPtr block = memory_or_none(segment.size, inbox);
  beginning_->parts.push_back({block->data(), segment.size});
  beginning_->missing += segment.size;
  beginning_->unasked += segment.size;
  missing_ += segment.size;
  return block;
}

void Scattered::discard(const Block* trailer) {
  if (!beginning_) return;
  for (Part& part : beginning_->parts) {
    if (!trailer || part.data != trailer->data()) part.data = nullptr;
  }
}

BlockPtr Scattered::place_of_piece(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) {
  if (segment.lease != 0 || segment.size == 0 || segment.size > kLargestPiece) return nullptr;
  const std::uint64_t number = frame.call_id;
  if (Pending* message = find(number)) {
    const auto at = locate(*message, static_cast<std::uint64_t>(frame.timeout), segment.size);
    if (!at || segment.size > message->unasked) return nullptr;
    message->unasked -= segment.size;
    return std::make_unique<Place>(*at, segment.size);
  }
  if (number < next_ || number - next_ >= kFarAhead) return nullptr;
  early_until_ = std::max(early_until_, number + 1);
  return memory_or_none(segment.size, inbox);
}

Scattered::Pending* Scattered::find(std::uint64_t number) {
  if (beginning_ && beginning_->number == number) return beginning_.get();
  for (const auto& m : messages_) {
    if (m->number == number) return m.get();
  }
  return nullptr;
}

/// Returns where `size` bytes at an offset belong: null if they are discarded, nothing if they cross a part's end.
std::optional<std::byte*> Scattered::locate(Pending& message, std::uint64_t place, std::uint64_t size) {
  for (const Part& part : message.parts) {
    if (place >= part.size) {
      place -= part.size;
    } else if (size <= part.size - place) {
      return part.data ? part.data + place : nullptr;
    } else {
      break;
    }
  }
  return std::nullopt;
}

/// Returns whether a message can be delivered without its content: a request or reply with a trailer that has arrived.
/// A fragmented trailer may be missing.
bool Scattered::may_be_discarded(const Pending& p) {
  const Incoming& m = p.message;
  if (!telegrad::may_be_discarded(m.header.type, m.payload_size())) return false;
  return !(m.header.flags & kTrailer) || m.segments.empty() ||
         std::none_of(p.parts.begin(), p.parts.end(),
                      [&](const Part& part) { return part.data == m.segments.back()->data(); });
}

/// Processes a complete fragment. Returns false if it does not fit.
bool Scattered::arrived(std::uint64_t number, std::uint64_t place, const Block& block) {
  Pending& message = *find(number);
  const auto at = locate(message, place, block.size());
  if (!at) return false;
  if (!dynamic_cast<const Place*>(&block)) {  // it arrived before its frame
    if (block.size() > message.unasked) return false;
    message.unasked -= block.size();
    if (block.data() && *at) std::memcpy(*at, block.data(), block.size());
    if (!block.data() && *at) {
      message.has_gap = true;
      if (&message != beginning_.get() && !may_be_discarded(message)) return false;
    }
  }
  message.missing -= block.size();
  missing_ -= block.size();
  return true;
}

bool Scattered::take(Incoming&& frame) {
  if (frame.header.type == FrameType::kPiece) {
    if (frame.segments.size() != 1) return false;
    const std::uint64_t number = frame.header.call_id, place = static_cast<std::uint64_t>(frame.header.timeout);
    if (find(number)) return arrived(number, place, *frame.segments[0]);
    if (number < next_) return false;
    early_bytes_ += on_the_wire(*frame.segments[0]);
    early_.push_back({number, place, std::move(frame.segments[0])});
    return early_bytes_ <= kMostEarly;
  }
  auto pending = beginning_ ? std::move(beginning_) : std::make_unique<Pending>();
  pending->message = std::move(frame);
  messages_.push_back(std::move(pending));
  bool good = true;
  std::erase_if(early_, [&](const Early& e) {
    const bool known = e.number < next_;
    if (known) early_bytes_ -= on_the_wire(*e.block);
    if (known) good = find(e.number) && arrived(e.number, e.place, *e.block) && good;
    return known;
  });
  const Pending& last = *messages_.back();
  return good && (!last.has_gap || may_be_discarded(last));
}

void Scattered::deliver(Inbox& inbox) {
  while (!messages_.empty() && messages_.front()->missing == 0) {
    const auto first = std::move(messages_.front());
    messages_.pop_front();
    Incoming& m = first->message;
    if (first->has_gap && m.discarded == 0) telegrad::discard(m, m.payload_size());
    inbox.deliver(std::move(first->message));
  }
}

}  // namespace telegrad
