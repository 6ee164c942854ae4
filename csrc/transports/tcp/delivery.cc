#include "transports/tcp/delivery.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <new>
#include <utility>

#include "core/left_out.h"
#include "transports/frames.h"

namespace telegrad {
namespace {

constexpr std::string_view kNotSentAgain =
    "the connection broke while a message was on its way whose memory may have changed since, so it was not sent "
    "again. Make the call again; retry= does so for idempotent functions.";

/// Bytes of a message that its owner reads at once, while it holds the GIL: a few milliseconds.
constexpr std::uint64_t kReadAtOnce = 16 << 20;

/// Owner of the memory of a message that is sent again, or a former owner.
struct Memory final : KeepAlive {
  explicit Memory(std::shared_ptr<Outgoing> message = nullptr) : large(std::move(message)) {}
  std::unique_ptr<std::byte[]> copy;
  std::shared_ptr<Outgoing> large;
};

bool may_lose_content(const FrameHeader& h) {
  return h.type == FrameType::kReply || (h.type == FrameType::kRequest && may_leave_out(h));
}

}  // namespace

bool Received::add(std::uint64_t number, std::uint64_t payload) {
  if (number < count_) return false;
  if (number == count_ && beyond_.empty()) [[likely]] {
    ++count_;
  } else {
    const auto next = beyond_.upper_bound(number);
    auto run = next == beyond_.begin() ? beyond_.end() : std::prev(next);
    if (run != beyond_.end() && number < run->second) return false;
    const bool joins_next = next != beyond_.end() && next->first == number + 1;
    const std::uint64_t end = joins_next ? next->second : number + 1;
    if (joins_next) beyond_.erase(next);
    if (number == count_) {
      count_ = end;
    } else if (run != beyond_.end() && run->second == number) {
      run->second = end;
    } else {
      beyond_.emplace(number, end);
    }
  }
  ++messages_;
  bytes_ += payload > kMaxCopied ? kBytesPerAck : payload;
  return true;
}

Acknowledgement Received::acknowledge() {
  messages_ = bytes_ = 0;
  const bool one_missing = !beyond_.empty() && beyond_.begin()->first == count_ + 1;
  return {.count = count_, .end = one_missing ? beyond_.begin()->second : 0};
}

std::uint64_t Unacknowledged::begin_next() {
  messages_.emplace_back();
  return end() - 1;
}

void Unacknowledged::keep(std::uint64_t number, Outgoing& m) {
  if (has_arrived(number)) return;
  Kept& kept = messages_[number - first_];
  kept.deadline = m.deadline;
  for (OutSegment& s : m.segments) s.lease = 0;  // of fragments
  if (m.payload_size() <= kMaxCopied) {
    kept.copy(m);
  } else if (m.owner && (m.immutable || m.stable || m.segments.empty())) {
    kept.large = std::make_shared<Outgoing>(std::move(m));
    if (!kept.large->reason.empty()) kept.large->body = kept.large->reason;
    if (kept.large->segments.empty()) kept.large->immutable = true;  // only segments are memory of the program
  } else if (m.owner && m.verifiable && may_lose_content(m.header)) {
    unverified_.push_back(number);
    kept.large = std::make_shared<Outgoing>(std::move(m));
    kept.check = Check::kUnverified;
  } else if (may_lose_content(m.header)) {
    kept.copy_without_content(m);
  } else {
    kept.copy(m);
  }
  bytes_ += kept.size;
}

void Unacknowledged::Kept::copy(const Outgoing& m) {
  FrameHeader header = m.header;
  fill_header(header, m);
  size = frame_size(m);
  frame.reset(new std::byte[size]);
  flatten(m, header, frame.get());
}

/// The definition of its name stays: later messages use it.
void Unacknowledged::Kept::copy_without_content(const Outgoing& m) {
  Outgoing rest;
  rest.header = m.header;
  for (const OutSegment& s : m.segments) rest.segments.push_back({s.data, s.size});
  leave_out(rest, LeftOut::kBroken, kNotSentAgain);
  rest.header.name_id = m.header.name_id;
  rest.name = m.name;
  copy(rest);
}

void Unacknowledged::release(std::uint64_t call, Released& released) {
  for (Kept& kept : messages_) {
    if (!kept.large || kept.large->immutable || kept.check != Check::kNone || kept.large->header.call_id != call)
      continue;
    const bool loses_content = may_lose_content(kept.large->header);
    loses_content ? kept.copy_without_content(*kept.large) : kept.copy(*kept.large);
    bytes_ += kept.size;
    released.push_back(std::make_unique<Memory>(std::move(kept.large)));
  }
}

/// Drops what is kept of a message that has arrived.
void Unacknowledged::drop(std::uint64_t number, Released& released) {
  Kept& kept = messages_[number - first_];
  if (std::exchange(kept.check, Check::kNone) != Check::kNone) std::erase(unverified_, number);
  kept.arrived = true;
  bytes_ -= std::exchange(kept.size, 0);
  kept.frame.reset();
  if (kept.large) released.push_back(std::make_unique<Memory>(std::move(kept.large)));
}

bool Unacknowledged::acknowledge(const Acknowledgement& arrived, Released& released) {
  if (arrived.count > end() || arrived.end > end()) return false;
  for (; first_ < arrived.count; ++first_) {
    drop(first_, released);
    messages_.pop_front();
  }
  for (std::uint64_t n = std::max(first_ + 1, arrived_until_); n < arrived.end; ++n) drop(n, released);
  arrived_until_ = std::max(arrived_until_, arrived.end);
  return true;
}

std::unique_ptr<Outgoing> Unacknowledged::again(std::uint64_t number, Nanos at, Released& released) {
  auto m = std::make_unique<Outgoing>();
  if (has_arrived(number)) {
    m->header.type = FrameType::kPong;
    return m;
  }
  Kept& kept = messages_[number - first_];
  if (kept.large && !kept.large->immutable) {  // its call may end while it is sent
    auto spent = copy_payload(*kept.large);
    if (spent) {
      released.push_back(std::move(spent));
    } else {
      drop_content(kept, released);
    }
  }
  auto memory = std::make_unique<Memory>();
  if (kept.large) {
    const Outgoing& source = *kept.large;
    m->header = source.header;
    m->name = source.name;
    m->body = source.body;
    for (const OutSegment& s : source.segments) m->segments.push_back({s.data, s.size});
    memory->large = kept.large;
  } else {
    memory->copy.reset(new std::byte[kept.size]);
    std::memcpy(memory->copy.get(), kept.frame.get(), kept.size);
    const std::byte* from = memory->copy.get();
    const auto take = [&from](std::uint64_t size) { return std::exchange(from, from + size); };
    const auto text = [&](std::uint64_t size) {
      return std::string_view(reinterpret_cast<const char*>(take(size)), size);
    };
    std::memcpy(&m->header, take(sizeof m->header), sizeof m->header);
    m->segments.resize(m->header.segment_count);
    for (OutSegment& s : m->segments) {
      SegmentHeader h;
      std::memcpy(&h, take(sizeof h), sizeof h);
      s.size = h.size;
    }
    m->name = text(m->header.name_size);
    m->body = text(m->header.body_size);
    for (OutSegment& s : m->segments) s.data = take(s.size);
  }
  m->owner = std::move(memory);
  m->immutable = true;
  m->deadline = kept.deadline;
  stamp_timeout(*m, at);
  return m;
}

// ---- verification

void Unacknowledged::drop_content(Kept& kept, Released& released) {
  kept.copy_without_content(*kept.large);
  bytes_ += kept.size;
  released.push_back(std::make_unique<Memory>(std::move(kept.large)));
}

bool Unacknowledged::has_unverified() const {
  return std::ranges::any_of(unverified_, [this](std::uint64_t number) { return number < verify_end_; });
}

std::optional<Unacknowledged::Unverified> Unacknowledged::take_unverified() {
  for (const std::uint64_t number : unverified_) {
    if (number >= verify_end_) continue;
    Kept& kept = messages_[number - first_];
    if (kept.check != Check::kUnverified) continue;
    kept.check = Check::kBeingCopied;
    return Unverified{.number = number, .message = kept.large};
  }
  return std::nullopt;
}

/// Returns null if the message has arrived or lost its content meanwhile.
Unacknowledged::Kept* Unacknowledged::find(const Unverified& taken) {
  if (has_arrived(taken.number)) return nullptr;
  Kept& kept = messages_[taken.number - first_];
  return kept.check != Check::kNone && kept.large == taken.message ? &kept : nullptr;
}

bool Unacknowledged::begin_check(const Unverified& taken) {
  Kept* kept = find(taken);
  if (kept) kept->check = Check::kAsked;
  return kept != nullptr;
}

void Unacknowledged::end_check(const Unverified& taken, std::shared_ptr<Outgoing> copy, Released& released) {
  Kept* kept = find(taken);
  if (!kept) return;
  kept->check = Check::kNone;
  std::erase(unverified_, taken.number);
  if (!copy) return drop_content(*kept, released);
  released.push_back(std::make_unique<Memory>(std::exchange(kept->large, std::move(copy))));
}

bool Unacknowledged::give_up_verifying(Released& released) {
  std::erase_if(unverified_, [&](std::uint64_t number) {
    Kept& kept = messages_[number - first_];
    if (number >= verify_end_ || kept.check == Check::kBeingCopied) return false;
    kept.check = Check::kNone;
    drop_content(kept, released);
    return true;
  });
  return has_unverified();
}

std::shared_ptr<Outgoing> copy_of(const Outgoing& message) {
  try {
    auto m = std::make_shared<Outgoing>();
    auto memory = std::make_unique<Memory>();
    memory->copy.reset(new std::byte[message.name.size() + message.payload_size()]);
    std::byte* to = memory->copy.get();
    const auto text = [&to](std::string_view from) {
      std::memcpy(to, from.data(), from.size());
      return std::string_view(reinterpret_cast<const char*>(std::exchange(to, to + from.size())), from.size());
    };
    m->header = message.header;
    m->deadline = message.deadline;
    m->name = text(message.name);
    m->body = text(message.body);
    for (const OutSegment& s : message.segments) {
      m->segments.push_back({to, s.size});
      for (std::uint64_t done = 0, size = 0; done < s.size; done += size) {
        size = std::min(s.size - done, kReadAtOnce);
        if (!message.owner->read(s.data + done, size, std::exchange(to, to + size))) return nullptr;
      }
    }
    m->immutable = true;
    m->owner = std::move(memory);
    return m;
  } catch (const std::bad_alloc&) {
    return nullptr;
  }
}

void rewind(Outgoing& m, Nanos at) {
  m.sent = m.total = m.passed = 0;
  m.segment = 0;
  m.prefix.clear();
  m.fragmented = false;
  for (OutSegment& s : m.segments) s.lease = 0;
  stamp_timeout(m, at);
}

}  // namespace telegrad
