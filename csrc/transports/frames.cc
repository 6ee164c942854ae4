#include "transports/frames.h"

#include <algorithm>
#include <cstring>
#include <new>
#include <utility>

#include "core/left_out.h"

namespace telegrad {
namespace {

constexpr std::size_t kMinDirectRead = 16 << 10;  // parts with at least this much missing are read directly into place

constexpr std::string_view kEncrypted =
    "the other end encrypts, and this one does not: give all workers the same option encryption";

/// Returns whether a frame begins like a record of TLS: a greeting or an alert, of any version 3.x.
bool is_tls(std::uint32_t magic) {
  const std::uint32_t kind = magic & 0xff;
  return (kind == 0x15 || kind == 0x16) && (magic >> 8 & 0xff) == 3;
}

std::uint64_t bytes_in_frame(const OutSegment& s) { return s.lease ? 0 : s.size; }

}  // namespace

// ---- writing

void fill_header(FrameHeader& h, const Outgoing& m) {
  h.name_size = static_cast<std::uint32_t>(m.name.size());
  h.body_size = m.body.size();
  h.segment_count = static_cast<std::uint32_t>(m.segments.size());
}

std::uint64_t payload_in_frame(const Outgoing& m) {
  std::uint64_t n = m.body.size();
  for (const auto& s : m.segments) n += bytes_in_frame(s);
  return n;
}

std::uint64_t frame_size(const Outgoing& m) {
  return sizeof m.header + m.segments.size() * sizeof(SegmentHeader) + m.name.size() + payload_in_frame(m);
}

std::size_t flatten(const Outgoing& m, const FrameHeader& header, std::byte* out) {
  std::byte* at = out;
  auto add = [&at](const void* data, std::size_t size) {
    if (size > 0) std::memcpy(at, data, size);
    at += size;
  };
  add(&header, sizeof header);
  for (const auto& s : m.segments) {
    const SegmentHeader h{.size = s.size, .lease = s.lease};
    add(&h, sizeof h);
  }
  add(m.name.data(), m.name.size());
  add(m.body.data(), m.body.size());
  for (const auto& s : m.segments) add(s.data, bytes_in_frame(s));
  return static_cast<std::size_t>(at - out);
}

void start_frame(Outgoing& m) {
  fill_header(m.header, m);
  if (!m.segments.empty() || !m.name.empty()) {
    m.prefix.reserve(m.segments.size() * sizeof(SegmentHeader) + m.name.size());
    for (const auto& s : m.segments) {
      const SegmentHeader h{.size = s.size, .lease = s.lease};
      m.prefix.append(reinterpret_cast<const char*>(&h), sizeof h);
    }
    m.prefix.append(m.name);
  }
  m.total = sizeof m.header + m.prefix.size() + payload_in_frame(m);
}

int fill_iovecs(Outgoing& m, iovec* out, int count, std::uint64_t most) {
  int n = 0;
  std::uint64_t at = 0;  // offset of the part in the frame
  auto add = [&](const void* data, std::uint64_t size) {
    const std::uint64_t skip = m.sent > at ? std::min(m.sent - at, size) : 0;
    const std::uint64_t taken = std::min(size - skip, most);
    if (taken > 0) out[n++] = {static_cast<char*>(const_cast<void*>(data)) + skip, taken};
    most -= taken;
    at += size;
  };
  add(&m.header, sizeof m.header);
  add(m.prefix.data(), m.prefix.size());
  add(m.body.data(), m.body.size());
  at += m.passed;
  for (std::size_t i = m.segment; i < m.segments.size() && n < count && most > 0; ++i) {
    const std::uint64_t size = bytes_in_frame(m.segments[i]);
    if (i == m.segment && at + size <= m.sent) {
      ++m.segment;
      m.passed += size;
    }
    add(m.segments[i].data, size);
  }
  return n;
}

// ---- reading

/// Moves bytes into a part of `size` bytes, or discards them if it has no memory; returns true when it is complete.
bool FrameReader::fill(void* to, std::size_t size) {
  const std::size_t n = std::min(size_, size - filled_);
  if (n > 0 && to) std::memcpy(static_cast<std::byte*>(to) + filled_, data_, n);
  data_ += n;
  size_ -= n;
  filled_ += n;
  if (filled_ < size) return false;
  filled_ = 0;
  return true;
}

bool FrameReader::begin_frame() {
  FrameHeader& h = incoming_.header;
  if (!fill(&h, sizeof h)) return false;
  if (h.magic != kMagic) {
    fail(is_tls(h.magic) ? std::string(kEncrypted) : "received bytes that are not a Telegrad frame");
  } else if (h.name_size > limits_.name || h.body_size > limits_.body || h.segment_count > limits_.segments) {
    fail("a frame of " + std::to_string(h.body_size) + " bytes with " + std::to_string(h.segment_count) +
         " segments and a name of " + std::to_string(h.name_size) + " bytes is over the limits (" +
         std::to_string(limits_.body) + ", " + std::to_string(limits_.segments) + ", " + std::to_string(limits_.name) +
         ")");
  } else {
    incoming_.number = is_numbered(h.type) ? numbered_++ : 0;
    incoming_.discarded = 0;
    const bool large = h.segment_count > 0 || h.body_size > kAlwaysTaken;
    incoming_.begun = large && h.timeout > 0 ? now() : 0;
    segment_headers_.clear();
    segment_ = 0;
    step_ = Step::kSegmentHeaders;
    return true;
  }
  return false;
}

bool FrameReader::begin_segments(Inbox& inbox) {
  // Read the headers one by one: a false count allocates nothing before the bytes have arrived.
  while (segment_headers_.size() < incoming_.header.segment_count) {
    if (!fill(&segment_header_, sizeof segment_header_)) return false;
    if ((segment_header_.lease != 0 || incoming_.header.type == FrameType::kFragment) && !source_) {
      fail(segment_header_.lease != 0 ? "received a segment in shared memory on a link that shares no memory"
                                      : "received a fragment on a link without lanes");
      return false;
    }
    segment_headers_.push_back(segment_header_);
  }
  if (!segment_headers_.empty() && !check_sizes()) return false;
  if (const std::size_t size = incoming_.header.name_size) incoming_.name = std::make_unique<std::string>(size, '\0');
  if (!allocate_frame(inbox)) return false;
  step_ = Step::kName;
  return true;
}

bool FrameReader::check_sizes() {
  std::uint64_t total = 0;
  const std::size_t count = segment_headers_.size() - (has_trailer() ? 1 : 0);
  for (std::size_t i = 0; i < count; ++i) {
    const std::uint64_t size = segment_headers_[i].size;
    if (size <= limits_.message && (total += size) <= limits_.message) continue;
    fail("a message of more than " + std::to_string(limits_.message) + " bytes is over the limit");
    return false;
  }
  if (has_trailer() && segment_headers_.back().size > limits_.trailer) {
    fail("a trailer of " + std::to_string(segment_headers_.back().size) + " bytes is over the limit");
    return false;
  }
  return true;
}

/// Gets the memory of the body and the segments. Returns false if a segment is not where its header says.
bool FrameReader::allocate_frame(Inbox& inbox) {
  const FrameHeader& frame = incoming_.header;
  std::uint64_t size = frame.body_size;
  for (const auto& h : segment_headers_) size += h.size;
  const bool discardable = may_be_discarded(frame.type, size + frame.name_size);
  bool has_memory = true;
  const auto allocate = [&](std::uint64_t bytes) -> BlockPtr {
    if (!has_memory) return std::make_unique<Discarded>(bytes);
    try {
      return inbox.allocate(bytes);
    } catch (const std::bad_alloc&) {
      if (!discardable) throw;
      has_memory = false;
      return std::make_unique<Discarded>(bytes);
    }
  };
  if (frame.body_size > 0) incoming_.body = allocate(frame.body_size);
  incoming_.segments.reserve(segment_headers_.size());
  for (const auto& h : segment_headers_) {
    const bool fragment = frame.type == FrameType::kFragment;
    const bool leased = h.lease != 0 || fragment;
    BlockPtr block = leased ? source_->map_segment(frame, h, inbox) : allocate(h.size);
    if (!block) {
      fail(fragment ? "received a fragment that belongs to no message"
                    : "received a segment in shared memory that has not been shared");
      return false;
    }
    if (!block->data() && !fragment) {
      if (!discardable) throw std::bad_alloc();
      has_memory = false;
    }
    incoming_.segments.push_back(std::move(block));
  }
  if (!has_memory) discard_content(inbox, size);
  return true;
}

/// Releases the memory and the leases of the frame at once and discards its remaining bytes. Throws std::bad_alloc if
/// there is no memory even for the trailer.
void FrameReader::discard_content(Inbox& inbox, std::uint64_t size) {
  discarded_ = size;
  if (incoming_.body) incoming_.body = std::make_unique<Discarded>(incoming_.body->size());
  auto& segments = incoming_.segments;
  const std::size_t count = segments.size() - (has_trailer() ? 1 : 0);
  for (std::size_t i = 0; i < count; ++i) segments[i] = std::make_unique<Discarded>(segments[i]->size());
  if (has_trailer() && !segments.back()->data()) {
    if (segment_headers_.back().lease != 0) throw std::bad_alloc();
    segments.back() = inbox.allocate(segment_headers_.back().size);
  }
  if (source_) source_->discard(has_trailer() ? segments.back().get() : nullptr);
}

void FrameReader::deliver(Inbox& inbox) {
  step_ = Step::kHeader;
  if (discarded_ > 0) discard(incoming_, std::exchange(discarded_, 0));
  inbox.deliver(Incoming(std::move(incoming_)));  // no content is left; `begin_frame` sets the rest
}

/// Parses one step; returns false if more bytes are needed or the stream is malformed.
bool FrameReader::parse(Inbox& inbox) {
  switch (step_) {
    case Step::kHeader:
      return begin_frame();
    case Step::kSegmentHeaders:
      return begin_segments(inbox);
    case Step::kName:
      if (incoming_.name && !fill(incoming_.name->data(), incoming_.name->size())) return false;
      step_ = Step::kBody;
      [[fallthrough]];
    case Step::kBody:
      if (incoming_.body && !fill(incoming_.body->data(), incoming_.body->size())) return false;
      step_ = Step::kSegments;
      [[fallthrough]];
    case Step::kSegments:
      for (; segment_ < incoming_.segments.size(); ++segment_) {
        const Block& block = *incoming_.segments[segment_];
        if (!segment_headers_[segment_].lease && !fill(block.data(), block.size())) return false;
      }
      deliver(inbox);
      return true;
  }
  return false;
}

bool FrameReader::read(const std::byte* data, std::size_t size, Inbox& inbox) {
  if (!error_.empty()) return false;
  data_ = data;
  size_ = size;
  while (parse(inbox)) {
  }
  return error_.empty();
}

std::size_t FrameReader::direct_target(std::byte** to) const {
  const Block* block = nullptr;
  if (step_ == Step::kBody) block = incoming_.body.get();
  if (step_ == Step::kSegments && segment_ < incoming_.segments.size()) block = incoming_.segments[segment_].get();
  if (!block || !block->data() || block->size() - filled_ < kMinDirectRead) return 0;
  *to = block->data() + filled_;
  return block->size() - filled_;
}

std::string FrameReader::end() const {
  if (step_ == Step::kHeader && filled_ == 0) return {};
  const bool tls = step_ == Step::kHeader && filled_ >= sizeof(std::uint32_t) && is_tls(incoming_.header.magic);
  return tls ? std::string(kEncrypted) : "the stream ended in the middle of a frame";
}

std::string FrameReader::describe() const {
  return "a message of " + std::to_string(incoming_.header.body_size) + " bytes and " +
         std::to_string(incoming_.header.segment_count) + " segments";
}

bool FrameBuffer::append(const Outgoing& m) {
  const std::uint64_t size = frame_size(m);
  const bool leased = std::any_of(m.segments.begin(), m.segments.end(), [](const auto& s) { return s.lease != 0; });
  if (leased || size > kFlatFrame || end_ + size > kFrameBufferSize) return false;
  if (!bytes_) {
    bytes_.reset(new (std::nothrow) std::byte[kFrameBufferSize]);
    if (!bytes_) return false;
  }
  FrameHeader header = m.header;
  fill_header(header, m);
  end_ += flatten(m, header, bytes_.get() + end_);
  return true;
}

void FrameBuffer::consume(std::size_t count) {
  begin_ += count;
  if (begin_ == end_) begin_ = end_ = 0;
}

}  // namespace telegrad
