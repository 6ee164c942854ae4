// Messages whose content is left out: for lack of memory, over the limits, or not to run any more.
//
// Input: flags, sizes of body and segments, a step, then the bytes of the body. The trailer remains, whatever happens.
#include <string>
#include <vector>

#include "core/left_out.h"
#include "fuzz/input.h"

namespace telegrad::fuzz {
namespace {

constexpr Limits kLimits{.body = 64, .message = 128, .segments = 3, .name = 8, .trailer = 32};
constexpr LeftOut kReasons[] = {LeftOut::kTooLarge, LeftOut::kNoMemory, LeftOut::kCanceled, LeftOut::kExpired};

struct Shape {
  explicit Shape(Input& in) : flags(in.number<std::uint16_t>()), why(kReasons[in.byte() & 3]) {
    for (int left = in.byte() & 7; left > 0; --left) segments.emplace_back(in.byte(), 's');
    name = in.take(in.byte());
    body = in.rest();
    if (!segments.empty()) segments.back().assign(segments.back().size(), 't');
  }
  bool has_trailer() const { return flags & kTrailer && !segments.empty(); }
  std::uint16_t flags;
  LeftOut why;
  std::vector<std::string> segments;
  std::string name, body;
};

void check_sent(const Shape& shape) {
  Outgoing m;
  m.header = {.type = FrameType::kRequest, .flags = shape.flags, .name_id = 3};
  m.name = shape.name;
  m.body = shape.body;
  for (const std::string& s : shape.segments)
    m.segments.push_back({reinterpret_cast<const std::byte*>(s.data()), s.size()});
  if (!fits(m, kLimits)) require(!over_limits(m, kLimits, "w1").empty(), "an error says what is too large");
  may_leave_out(m.header);
  leave_out(m, shape.why, shape.body);
  require(m.header.flags & kLeftOut && m.header.name_id == 0, "the message says that its content is left out");
  require(m.body.size() == shape.body.size() + 1 && m.body[0] == static_cast<char>(shape.why), "it has the reason");
  require(m.segments.size() == (shape.has_trailer() ? 1 : 0), "only the trailer remains");
  if (shape.has_trailer()) require(m.segments[0].size == shape.segments.back().size(), "the trailer is whole");
}

void check_received(const Shape& shape) {
  const auto pool = BufferPool::make(0);
  const auto block_of = [&](const std::string& bytes) {
    BlockPtr block = pool->allocate(bytes.size());
    std::memcpy(block->data(), bytes.data(), bytes.size());
    return block;
  };
  Incoming m;
  m.header = {.type = FrameType::kRequest, .flags = shape.flags};
  if (!shape.body.empty()) m.body = block_of(shape.body);
  for (const std::string& s : shape.segments) m.segments.push_back(block_of(s));
  const std::uint64_t size = m.payload_size();
  const bool expired = has_expired(m);
  require(!expired || shape.body[0] == static_cast<char>(LeftOut::kExpired), "an expired request says so");
  leave_out(m, shape.why, *pool);
  require(m.body_view().size() == 1 && m.body_view()[0] == static_cast<char>(shape.why), "the reason is the body");
  require(size == 0 || m.payload_size() == size, "it counts what has arrived");
  require(m.segments.size() == (shape.has_trailer() ? 1 : 0), "only the trailer remains of what arrived");
  if (shape.has_trailer()) {
    const std::string& trailer = shape.segments.back();
    require(m.segments[0]->size() == trailer.size() &&
                std::memcmp(m.segments[0]->data(), trailer.data(), trailer.size()) == 0,
            "the trailer that arrived is whole");
  }
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace telegrad::fuzz;
  Input in(data, size);
  const Shape shape(in);
  check_sent(shape);
  check_received(shape);
  return 0;
}
