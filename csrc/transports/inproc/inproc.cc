// Links within one process: a worker's calls to itself, and tests. Two queues with the bounds, blocking and
// end-of-stream behavior of a socket, and memory to lease.
#include <fcntl.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstring>
#include <deque>
#include <map>
#include <numeric>
#include <span>
#include <system_error>

#include "base/fork_handlers.h"
#include "base/unique_fd.h"
#include "core/left_out.h"
#include "transports/inproc/lease_pool.h"
#include "transports/transports.h"

namespace telegrad {
namespace {

constexpr std::size_t kMaxQueued = 4 << 20;  // bytes queued per direction before `send` returns kBlocked

/// Descriptor with controllable readiness: one end of a socket pair, with the other end held here. A byte sent from the
/// other end makes it readable; a full buffer makes it unwritable.
class ReadinessFd {
 public:
  ReadinessFd() {
    int ends[2];
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, ends) != 0) {
      throw std::system_error(errno, std::generic_category(), "cannot create a socket pair");
    }
    outside_ = UniqueFd(ends[0]);
    inside_ = UniqueFd(ends[1]);
    const int least = 1;
    setsockopt(outside_.get(), SOL_SOCKET, SO_SNDBUF, &least, sizeof least);
  }

  int fd() const { return outside_.get(); }

  void set_readable(bool on) {
    if (readable_ == on) return;
    readable_ = on;
    if (on) {
      ::send(inside_.get(), "!", 1, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
      drain(outside_);
    }
  }

  void set_writable(bool on) {
    if (writable_ == on) return;
    writable_ = on;
    if (on) {
      drain(inside_);
    } else {
      const char filling[2048] = {};
      while (::send(outside_.get(), filling, sizeof filling, MSG_DONTWAIT | MSG_NOSIGNAL) > 0) {
      }
    }
  }

 private:
  static void drain(const UniqueFd& socket) {
    char bytes[8192];
    while (::recv(socket.get(), bytes, sizeof bytes, MSG_DONTWAIT) > 0) {
    }
  }

  UniqueFd outside_, inside_;
  bool readable_ = false;
  bool writable_ = true;
};

struct QueuedMessage {
  FrameHeader header;
  std::string name;
  std::string body;
  std::vector<std::unique_ptr<std::byte[]>> segments;  // null for leased memory
  std::vector<BlockPtr> passed;
  std::vector<std::size_t> sizes;
  std::size_t total = 0;        // bytes that are copied
  std::uint64_t discarded = 0;  // bytes for which there was no memory; then only the trailer is in `segments`
};

bool has_trailer(const FrameHeader& h, std::size_t segments) { return h.flags & kTrailer && segments > 0; }

QueuedMessage pack(const Outgoing& m, std::span<const OutSegment> segments, std::string_view body, LeasePool& leases) {
  QueuedMessage p;
  p.header = m.header;
  p.header.name_size = static_cast<std::uint32_t>(m.name.size());
  p.header.body_size = body.size();
  p.header.segment_count = static_cast<std::uint32_t>(segments.size());
  p.name = m.name;
  p.body = body;
  p.total = body.size() + m.name.size() + sizeof p.header;
  for (const auto& s : segments) {
    p.total += s.size;
    p.sizes.push_back(s.size);
    p.passed.push_back(leases.pass(s));
    p.segments.emplace_back();
    if (p.passed.back()) {
      p.total -= s.size;
      continue;
    }
    p.segments.back().reset(new std::byte[s.size]);
    if (s.size > 0) std::memcpy(p.segments.back().get(), s.data, s.size);
  }
  return p;
}

/// Copies a message; without its content if it is a request or reply for which there is no memory.
QueuedMessage pack(const Outgoing& m, LeasePool& leases) {
  try {
    return pack(m, m.segments, m.body, leases);
  } catch (const std::bad_alloc&) {
    if (!may_be_discarded(m.header.type, m.payload_size() + m.name.size())) throw;
    const std::span<const OutSegment> all(m.segments);
    QueuedMessage p = pack(m, all.last(has_trailer(m.header, all.size()) ? 1 : 0), {}, leases);
    p.discarded = m.payload_size();
    return p;
  }
}

/// Queue of one direction.
struct Pipe {
  std::deque<QueuedMessage> queue;
  std::size_t bytes = 0;
  std::atomic<std::uint64_t> passed = 0;  // bytes, from the start
};

/// State that both ends share. readiness[i] is end i's: readable if pipe[i] has messages or the link is closed,
/// writable unless the other pipe is full.
struct Shared {
  std::mutex mutex;
  Pipe pipe[2];
  bool closed = false;
  ReadinessFd readiness[2];
  const std::shared_ptr<LeasePool> leases = std::make_shared<LeasePool>();
};

class InprocLink final : public Link {
 public:
  InprocLink(std::shared_ptr<Shared> shared, int end) : shared_(std::move(shared)), end_(end) {}
  ~InprocLink() override { close(); }

  int fd() const override { return shared_->readiness[end_].fd(); }

  SendState send(Outgoing& m) override {
    const int other = 1 - end_;
    std::lock_guard lock(shared_->mutex);
    if (shared_->closed) return SendState::kBroken;
    Pipe& pipe = shared_->pipe[other];
    if (pipe.bytes >= kMaxQueued) {
      shared_->readiness[end_].set_writable(false);
      return SendState::kBlocked;
    }
    try {
      pipe.queue.push_back(pack(m, *shared_->leases));
    } catch (const std::bad_alloc&) {
      error_ = "no memory for a message";
      close_locked();
      return SendState::kBroken;
    }
    pipe.bytes += pipe.queue.back().total;
    pipe.passed += pipe.queue.back().total;
    shared_->readiness[other].set_readable(true);
    return SendState::kSent;
  }

  std::optional<LinkLease> lease(std::size_t size) override {
    try {
      return shared_->leases->lease(size);
    } catch (const std::bad_alloc&) {
      return std::nullopt;
    }
  }

  ReceiveState receive(Inbox& inbox, std::size_t budget) override {
    const int other = 1 - end_;
    std::size_t got = 0;
    while (true) {
      QueuedMessage p;
      {
        std::lock_guard lock(shared_->mutex);
        Pipe& pipe = shared_->pipe[end_];
        if (broken_) return ReceiveState::kBroken;
        if (pipe.queue.empty()) {
          if (shared_->closed) return ReceiveState::kBroken;
          shared_->readiness[end_].set_readable(false);
          return ReceiveState::kIdle;
        }
        if (got >= budget) return ReceiveState::kMore;
        p = std::move(pipe.queue.front());
        pipe.queue.pop_front();
        pipe.bytes -= p.total;
        if (pipe.bytes <= kMaxQueued / 2) shared_->readiness[other].set_writable(true);
      }
      got += p.total;
      std::string why = deliver(inbox, std::move(p));
      if (!why.empty()) {
        std::lock_guard lock(shared_->mutex);
        error_ = std::move(why);
        broken_ = true;
        close_locked();
      }
    }
  }

  void set_limits(const Limits& limits) override { limits_ = limits; }

  void close() override {
    std::lock_guard lock(shared_->mutex);
    close_locked();
  }

  LinkError error() const override {
    std::lock_guard lock(shared_->mutex);
    return error_;
  }
  PeerCredentials peer_credentials(CredentialLookup&) const override {
    return {.kind = PeerCredentials::Kind::kUser, .uid = geteuid()};
  }
  std::uint64_t received_bytes() const override { return shared_->pipe[end_].passed.load(std::memory_order_relaxed); }
  std::string describe() const override { return "inproc"; }

 private:
  void close_locked() {
    shared_->closed = true;
    for (ReadinessFd& readiness : shared_->readiness) {
      readiness.set_readable(true);
      readiness.set_writable(true);
    }
  }

  /// Delivers a parcel; returns the error, or "".
  std::string deliver(Inbox& inbox, QueuedMessage p) const {
    const FrameHeader& h = p.header;
    const bool trailer = has_trailer(h, p.sizes.size());
    const std::uint64_t total = std::accumulate(p.sizes.begin(), p.sizes.end() - (trailer ? 1 : 0), std::uint64_t{0});
    if (h.magic != kMagic) return "received bytes that are not a Telegrad frame";
    if (h.name_size > limits_.name || h.body_size > limits_.body || h.segment_count > limits_.segments ||
        total > limits_.message || (trailer && p.sizes.back() > limits_.trailer)) {
      return "a frame is over the limits";
    }
    const std::uint64_t size = h.body_size + total + (trailer ? p.sizes.back() : 0);
    try {
      Incoming m;
      m.header = h;
      if (!p.name.empty()) m.name = std::make_unique<std::string>(std::move(p.name));
      if (p.discarded > 0 || !take_content(inbox, p, m)) {
        if (p.discarded == 0 && !may_be_discarded(h.type, size + h.name_size)) return "no memory for a message";
        m.segments.clear();
        if (trailer) m.segments.push_back(take_segment(inbox, p, p.sizes.size() - 1));
        discard(m, p.discarded > 0 ? p.discarded : size);
      }
      inbox.deliver(std::move(m));
      return "";
    } catch (const std::bad_alloc&) {
      return "no memory for a message";
    }
  }

  /// Returns false if there is no memory for it.
  static bool take_content(Inbox& inbox, QueuedMessage& p, Incoming& m) {
    try {
      if (!p.body.empty()) {
        m.body = inbox.allocate(p.body.size());
        std::memcpy(m.body->data(), p.body.data(), p.body.size());
      }
      for (std::size_t i = 0; i < p.sizes.size(); ++i) m.segments.push_back(take_segment(inbox, p, i));
      return true;
    } catch (const std::bad_alloc&) {
      return false;
    }
  }

  static BlockPtr take_segment(Inbox& inbox, QueuedMessage& p, std::size_t i) {
    if (p.passed[i]) return inbox.adopt(std::move(p.passed[i]));
    BlockPtr block = inbox.allocate(p.sizes[i]);
    if (p.sizes[i] > 0) std::memcpy(block->data(), p.segments[i].get(), p.sizes[i]);
    return block;
  }

  std::shared_ptr<Shared> shared_;
  const int end_;
  Limits limits_;
  bool broken_ = false;  // the receiving side has failed: nothing more is delivered
  LinkError error_;
};

class InprocListener;

struct Names {
  std::mutex mutex;
  std::map<std::string, InprocListener*> listeners;
};

Names& names() {
  static auto* n = new Names;  // never destroyed: forks hold its lock
  return *n;
}

[[maybe_unused]] const bool registered = lock_at_fork(names().mutex);

class InprocListener final : public Listener {
 public:
  explicit InprocListener(std::string address)
      : address_(std::move(address)), readiness_(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC)) {
    std::lock_guard lock(names().mutex);
    if (!names().listeners.emplace(address_, this).second) {
      throw std::system_error(EADDRINUSE, std::generic_category(), "cannot listen on " + address_);
    }
  }
  ~InprocListener() override {
    std::lock_guard lock(names().mutex);
    names().listeners.erase(address_);
  }

  int fd() const override { return readiness_.get(); }
  std::string address() const override { return address_; }

  std::unique_ptr<Link> accept() override {
    std::lock_guard lock(names().mutex);
    std::uint64_t count;
    if (waiting_.empty()) {
      [[maybe_unused]] auto n = ::read(readiness_.get(), &count, sizeof count);
      return nullptr;
    }
    auto link = std::move(waiting_.front());
    waiting_.pop_front();
    return link;
  }

  void push(std::unique_ptr<Link> link) {  // requires names().mutex
    waiting_.push_back(std::move(link));
    const std::uint64_t one = 1;
    [[maybe_unused]] auto n = ::write(readiness_.get(), &one, sizeof one);
  }

 private:
  const std::string address_;
  UniqueFd readiness_;
  std::deque<std::unique_ptr<Link>> waiting_;
};

class InprocTransport final : public Transport {
 public:
  std::unique_ptr<Listener> listen(const std::string& address, const LinkSecurityPtr&) override {
    return std::make_unique<InprocListener>(address);
  }
  std::unique_ptr<Link> connect(const std::string& address, const LinkSecurityPtr&) override {
    std::lock_guard lock(names().mutex);
    auto found = names().listeners.find(address);
    if (found == names().listeners.end()) {
      throw std::system_error(ECONNREFUSED, std::generic_category(), "cannot reach " + address);
    }
    auto shared = std::make_shared<Shared>();
    found->second->push(std::make_unique<InprocLink>(shared, 1));
    return std::make_unique<InprocLink>(shared, 0);
  }
};

}  // namespace

Transport* inproc_transport() {
  static InprocTransport t;
  return &t;
}

}  // namespace telegrad
