// Fragmented messages over three lanes, from a hostile sender.
//
// Input: settings, then frames: a lane, a kind, and the fields of a message, of a fragment, or raw bytes; each may be
// read in two parts. Lanes other than the first carry fragments only, as in a LanedLink.
#include <array>
#include <memory>
#include <string>

#include "fuzz/inbox.h"
#include "fuzz/input.h"
#include "transports/fragments/reassembler.h"

namespace telegrad::fuzz {
namespace {

constexpr std::size_t kLanes = 3;
constexpr Limits kLimits{.body = 256, .message = 4096, .segments = 4, .name = 16, .trailer = 64};

/// Passes frames of one lane to the reassembler.
class LaneInbox final : public Inbox {
 public:
  LaneInbox(Reassembler& reassembler, SmallInbox& inbox, bool first)
      : reassembler_(reassembler), inbox_(inbox), first_(first) {}
  BlockPtr allocate(std::size_t size) override { return inbox_.allocate(size); }
  void deliver(Incoming&& frame) override {
    if (!good) return;
    good = (first_ || frame.header.type == FrameType::kFragment) && reassembler_.accept(std::move(frame));
  }
  bool good = true;

 private:
  Reassembler& reassembler_;
  SmallInbox& inbox_;
  const bool first_;
};

class Receiver {
 public:
  explicit Receiver(std::size_t refuse_from) : inbox_(refuse_from) {
    reassembler_.set_limits(kLimits);
    for (std::size_t i = 0; i < kLanes; ++i) {
      readers_[i].set_limits(kLimits);
      inboxes_[i] = std::make_unique<LaneInbox>(reassembler_, inbox_, i == 0);
    }
  }

  /// Reads bytes of one lane. Returns false once the link has failed.
  bool read(std::size_t lane, std::string_view bytes) {
    try {
      const bool good =
          readers_[lane].read(reinterpret_cast<const std::byte*>(bytes.data()), bytes.size(), *inboxes_[lane]);
      if (!good || !inboxes_[lane]->good) return false;
    } catch (const std::bad_alloc&) {
      return false;
    }
    reassembler_.deliver(inbox_);
    for (const Incoming& m : inbox_.messages) check(m);
    inbox_.messages.clear();
    return true;
  }

 private:
  static void check(const Incoming& m) {
    require(m.header.type != FrameType::kFragment, "fragments are not delivered");
    std::uint64_t sum = 0;
    for (const BlockPtr& s : m.segments) {
      sum += s->size();
      for (std::size_t i = 0; i < s->size(); ++i) sum += static_cast<std::uint8_t>(s->data()[i]) & 1;  // readable
    }
    require(m.segments.size() <= kLimits.segments && sum <= 2 * (kLimits.message + kLimits.trailer),
            "it is in the limits");
  }

  SmallInbox inbox_;
  Reassembler reassembler_;
  FragmentSource lane_source_{reassembler_};
  std::array<FrameReader, kLanes> readers_{FrameReader(&reassembler_), FrameReader(&lane_source_),
                                           FrameReader(&lane_source_)};
  std::array<std::unique_ptr<LaneInbox>, kLanes> inboxes_;
};

void append(std::string& to, const auto& value) { to.append(reinterpret_cast<const char*>(&value), sizeof value); }

std::string message(Input& in) {
  const std::uint8_t shape = in.byte();
  FrameHeader h{.type = shape & 0x80 ? FrameType::kReply : FrameType::kRequest,
                .flags = static_cast<std::uint16_t>(shape & 0x40 ? kTrailer : 0),
                .body_size = in.byte(),
                .segment_count = shape & 7u};
  std::string frame, inline_bytes;
  append(frame, h);
  for (std::uint32_t i = 0; i < h.segment_count; ++i) {
    const std::uint16_t size = in.number<std::uint16_t>();
    const bool fragmented = !(size & 0x8000);
    const SegmentHeader segment{.size = size & 0x7fffu, .lease = fragmented ? kFragmented : 0};
    append(frame, segment);
    if (!fragmented) inline_bytes.append(segment.size, 'i');
  }
  return frame + std::string(h.body_size, 'b') + inline_bytes;
}

std::string fragment(Input& in) {
  FrameHeader h{
      .type = FrameType::kFragment, .segment_count = 1, .call_id = in.byte(), .timeout = in.number<std::int16_t>()};
  const SegmentHeader segment{.size = in.number<std::uint16_t>(), .lease = 0};
  std::string frame;
  append(frame, h);
  append(frame, segment);
  return frame + std::string(segment.size, 'f');
}

void run(Input in) {
  Receiver receiver(1 + std::size_t{in.number<std::uint16_t>()});
  std::array<std::string, kLanes> unread;  // the second parts of frames
  for (int steps = 0; steps < 64 && !in.empty(); ++steps) {
    const std::uint8_t choice = in.byte();
    const std::size_t lane = (choice & 3) % kLanes;
    std::string bytes = std::move(unread[lane]);
    unread[lane].clear();
    switch (choice >> 2 & 3) {
      case 0:
        bytes += message(in);
        break;
      case 1:
        bytes += fragment(in);
        break;
      case 2:
        bytes += in.take(in.byte());
        break;
      default:
        break;  // the rest of the last frame only
    }
    const std::size_t now = choice & 0x10 ? std::min<std::size_t>(bytes.size(), in.byte()) : bytes.size();
    unread[lane] = bytes.substr(now);
    if (!receiver.read(lane, std::string_view(bytes).substr(0, now))) return;
  }
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
