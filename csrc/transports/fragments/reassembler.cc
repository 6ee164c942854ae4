#include "transports/fragments/reassembler.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/left_out.h"

namespace telegrad {
namespace {

constexpr std::uint64_t kFarAhead = 1024;      // limit for fragments before their frames: in messages,
constexpr std::uint64_t kSegmentMemory = 128;  // of a block and its place, without its bytes
constexpr std::uint64_t kMaxEarly = 64 << 20;  // and in bytes; lanes are paused before they reach it

std::uint64_t wire_size(const Block& fragment) { return sizeof(FrameHeader) + sizeof(SegmentHeader) + fragment.size(); }

/// Allocates memory for received bytes; if there is none, they are discarded.
BlockPtr memory_or_none(std::uint64_t size, Inbox& inbox) {
  try {
    return inbox.allocate(size);
  } catch (const std::bad_alloc&) {
    return std::make_unique<Discarded>(size);
  }
}

/// Place of a fragment within its message, which owns the memory.
class FragmentBlock final : public Block {
 public:
  FragmentBlock(std::byte* data, std::size_t size) : Block(data, size) {}
};

}  // namespace

BlockPtr Reassembler::map_segment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) {
  if (frame.type == FrameType::kFragment) return map_fragment(frame, segment, inbox);
  if (segment.lease != kFragmented || missing_ > limits_.message + kMaxMissing) return nullptr;
  if (!current_) {
    current_ = std::make_unique<Pending>();
    current_->number = next_++;
  }
  BlockPtr block = memory_or_none(segment.size, inbox);
  const std::uint64_t begin = current_->parts.empty() ? 0 : current_->parts.back().end();
  current_->parts.push_back({block->data(), begin, segment.size});
  current_->missing += segment.size;
  current_->unclaimed += segment.size;
  missing_ += segment.size;
  return block;
}

void Reassembler::discard(const Block* trailer) {
  if (!current_) return;
  for (Part& part : current_->parts) {
    if (!trailer || part.data != trailer->data()) part.data = nullptr;
  }
}

BlockPtr Reassembler::map_fragment(const FrameHeader& frame, const SegmentHeader& segment, Inbox& inbox) {
  if (segment.lease != 0 || segment.size == 0 || segment.size > kMaxFragment) return nullptr;
  const std::uint64_t number = frame.call_id;
  if (Pending* message = find(number)) {
    const auto at = locate(*message, static_cast<std::uint64_t>(frame.timeout), segment.size);
    if (!at || segment.size > message->unclaimed) return nullptr;
    message->unclaimed -= segment.size;
    return std::make_unique<FragmentBlock>(*at, segment.size);
  }
  if (number < next_ || number - next_ >= kFarAhead) return nullptr;
  early_until_ = std::max(early_until_, number + 1);
  return memory_or_none(segment.size, inbox);
}

Reassembler::Pending* Reassembler::find(std::uint64_t number) {
  if (current_ && current_->number == number) return current_.get();
  for (const auto& m : messages_) {
    if (m->number == number) return m.get();
  }
  return nullptr;
}

/// Returns where `size` bytes at an offset belong: null if they are discarded, nothing if they cross a part's end.
std::optional<std::byte*> Reassembler::locate(Pending& message, std::uint64_t place, std::uint64_t size) {
  const auto part = std::ranges::upper_bound(message.parts, place, {}, &Part::end);
  if (part == message.parts.end() || size > part->end() - place) return std::nullopt;
  return part->data ? part->data + (place - part->begin) : nullptr;
}

/// Returns whether a message can be delivered without its content: a request or reply with a trailer that has arrived.
/// A fragmented trailer may be missing.
bool Reassembler::may_be_discarded(const Pending& p) {
  const Incoming& m = p.message;
  if (!telegrad::may_be_discarded(m.header.type, m.payload_size())) return false;
  return !(m.header.flags & kTrailer) || m.segments.empty() ||
         std::none_of(p.parts.begin(), p.parts.end(),
                      [&](const Part& part) { return part.data == m.segments.back()->data(); });
}

/// Processes a complete fragment. Returns false if it does not fit.
bool Reassembler::complete_fragment(std::uint64_t number, std::uint64_t place, const Block& block) {
  Pending& message = *find(number);
  const auto at = locate(message, place, block.size());
  if (!at) return false;
  if (!dynamic_cast<const FragmentBlock*>(&block)) {  // it arrived before its frame
    if (block.size() > message.unclaimed) return false;
    message.unclaimed -= block.size();
    if (block.data() && *at) std::memcpy(*at, block.data(), block.size());
    if (!block.data() && *at) {
      message.incomplete = true;
      if (&message != current_.get() && !may_be_discarded(message)) return false;
    }
  }
  message.missing -= block.size();
  missing_ -= block.size();
  return true;
}

bool Reassembler::accept(Incoming&& frame) {
  if (frame.header.type == FrameType::kFragment) {
    if (frame.segments.size() != 1) return false;
    const std::uint64_t number = frame.header.call_id, place = static_cast<std::uint64_t>(frame.header.timeout);
    if (find(number)) return complete_fragment(number, place, *frame.segments[0]);
    if (number < next_) return false;
    early_bytes_ += wire_size(*frame.segments[0]);
    early_.push_back({number, place, std::move(frame.segments[0])});
    return early_bytes_ <= kMaxEarly;
  }
  auto pending = current_ ? std::move(current_) : std::make_unique<Pending>();
  pending->memory = memory_of(frame);
  pending->message = std::move(frame);
  messages_.push_back(std::move(pending));
  const Pending& last = *messages_.back();
  bool good = true;
  if (last.number != kWhole) {
    std::erase_if(early_, [&](const EarlyFragment& e) {
      const bool known = e.number < next_;
      if (known) early_bytes_ -= wire_size(*e.block);
      if (known) good = find(e.number) && complete_fragment(e.number, e.place, *e.block) && good;
      return known;
    });
  }
  return good && is_within_limits() && (!last.incomplete || may_be_discarded(last));
}

std::uint64_t Reassembler::memory_of(const Incoming& m) {
  return sizeof(Pending) + m.name_view().size() + m.segments.size() * kSegmentMemory + m.payload_size();
}

bool Reassembler::is_within_limits() const {
  const std::uint64_t largest = limits_.message + limits_.body + limits_.trailer + limits_.segments * kSegmentMemory;
  return incomplete_ <= kMaxIncomplete && held_ <= kMaxHeld && held_bytes_ <= kMaxHeldBytes &&
         held_large_ <= largest + kMaxMissing;
}

void Reassembler::deliver_complete(Inbox& inbox) {
  DeliveryOrder order;  // of the messages before `next` that stay
  bool large = false;   // one of them is
  incomplete_ = held_ = 0;
  held_bytes_ = held_large_ = 0;
  for (auto next = messages_.begin(); next != messages_.end();) {
    Pending& pending = **next;
    const bool is_large = pending.number != kWhole;
    if (pending.missing > 0 || (is_large ? large : !order.may_overtake(pending.message.header))) {
      order.add(pending.message.header);
      ++(pending.missing > 0 ? incomplete_ : held_);
      if (!is_large) held_bytes_ += pending.memory - pending.missing;
      if (is_large && large) held_large_ += pending.memory - pending.missing;
      large = large || is_large;
      ++next;
      continue;
    }
    const auto taken = std::move(*next);
    next = messages_.erase(next);
    Incoming& m = taken->message;
    if (taken->incomplete && m.discarded == 0) telegrad::discard(m, m.payload_size());
    inbox.deliver(std::move(m));
  }
}

void ReassemblingInbox::deliver(Incoming&& m) {
  if (reassembler_.passes(m)) return inbox_.deliver(std::move(m));
  good_ = reassembler_.accept(std::move(m)) && good_;
  reassembler_.deliver(inbox_);
}

}  // namespace telegrad
