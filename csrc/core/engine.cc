// Construction, stop, fork and statistics of the engine.
#include "core/engine.h"

#include <pthread.h>
#include <sched.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/timerfd.h>

#include <algorithm>
#include <system_error>
#include <utility>

#include "core/forks.h"

namespace telegrad {
namespace {

Descriptor check(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return Descriptor(fd);
}

void add(const Descriptor& epoll, int fd, std::uint64_t token, std::uint32_t events) {
  epoll_event event{.events = events, .data = {.u64 = token}};
  if (epoll_ctl(epoll.get(), EPOLL_CTL_ADD, fd, &event) != 0) {
    throw std::system_error(errno, std::generic_category(), "cannot add a descriptor to epoll");
  }
}

/// Returns how many processors this process may use.
int processors() {
  cpu_set_t set;
  return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

}  // namespace

Engine::Engine(Settings settings)
    : settings_(std::move(settings)),
      pool_(Pool::make(settings_.pool_cache)),
      commons_(std::make_shared<Commons>(settings_.credo.limits.lent)),
      inner_(check(epoll_create1(EPOLL_CLOEXEC), "cannot create an epoll descriptor")),
      outer_(check(epoll_create1(EPOLL_CLOEXEC), "cannot create an epoll descriptor")),
      kick_(check(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "cannot create an eventfd")),
      park_bell_(check(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "cannot create an eventfd")),
      timer_(check(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC), "cannot create a timerfd")),
      nudge_(check(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "cannot create a timerfd")),
      spinning_(std::max(processors() / 2, 1)),
      caller_spin_(settings_.spin) {
  add(inner_, kick_.get(), kKickToken, EPOLLIN);
  add(inner_, nudge_.get(), kNudgeToken, EPOLLIN);
  add(outer_, inner_.get(), kInnerToken, 0);
  add(outer_, park_bell_.get(), kParkToken, EPOLLIN);
  timekeeper_ = std::thread([this] { keep_time(); });
  pthread_setname_np(timekeeper_.native_handle(), "telegrad-time");
  remember_at_forks(this);
}

Engine::~Engine() {
  forget_at_forks(this);
  stop(0);
  {
    std::lock_guard lock(mutex_);
    quit_ = true;
    timer_at_ = kNever;
    arm_timer(1);
  }
  if (timekeeper_.joinable()) timekeeper_.join();  // a forked child has none
  pool_->retire();                                 // holders of received memory must not keep the cache alive
}

void Engine::stop(Nanos linger) {
  const Nanos deadline = now() + linger;
  std::vector<ConnectionPtr> open;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(leaving_, true)) return;
  }
  Waiter w;
  auto nothing_waits = [&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [](const auto& p) { return p.second.connecting && !p.second.waiting.empty(); });
  };
  wait_for(For::kProgress, w, nothing_waits, deadline, {});  // messages already accepted must get a connection
  {
    std::lock_guard lock(mutex_);
    stopping_ = true;
    for (auto& [token, c] : connections_) open.push_back(c);
  }
  for (auto& c : open) {
    if (c->state != Connection::State::kOpen) continue;
    auto m = std::make_unique<Outgoing>();
    m->header.type = FrameType::kGoodbye;
    Passage p{.via = c};
    if (transmit(c, m, p) == Sent::kQueued) wait_until_gone(c->peer, p, deadline, {});
  }
  for (auto& c : open) lost(c, "this worker has been shut down");
  Kept kept;
  Lock lock(mutex_);
  stopped_ = true;
  calls_.for_each([&](std::uint64_t id, Call&) {
    settle(id, Outcome{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, kept);
  });
  for (auto& [id, peer] : peers_) unreachable(peer, "this worker has been shut down", kept);
  for (auto& [id, l] : lingering_) kept.push_back(std::move(l.keep));
  lingering_.clear();
  listeners_.clear();
  hurry_lazy();
  for (PoolThread* t : idle_) t->bell.ring();
  for (Waiter* sleeper : sleepers_) sleeper->bell.ring();
  ring_park();
  kick();
  lock.unlock();
  kept.clear();
}

EngineStats Engine::stats() const {
  std::lock_guard lock(mutex_);
  EngineStats s;
  s.pending_calls = calls_.size();
  s.queued_requests = nested_.size() + top_.size();
  s.pool_threads = threads_;
  s.running_handlers = running_;
  s.running_requests = running_requests_;
  s.connections = connections_.size();
  for (const auto& [token, c] : connections_) s.lanes += c->link->lanes();
  s.requests = requests_;
  s.replies = replies_;
  s.sent_messages = sent_messages_;
  s.received_messages = received_messages_;
  s.memory = pool_->stats();
  s.common_pieces = commons_->stats().pieces;
  return s;
}

void Engine::before_fork() {
  mutex_.lock();
  pool_->before_fork();
}

void Engine::after_fork_in_parent() {
  pool_->after_fork();
  mutex_.unlock();
}

/// Leaves the child with a stopped engine: it has no threads, and its links belong to the parent. Objects that other
/// threads of the parent were using may be in an inconsistent state and are never destroyed: links and their locks,
/// threads and their stacks.
void Engine::after_fork_in_child() {
  for (auto& [token, c] : connections_) {
    for (const int fd : c->link->descriptors()) ::close(fd);
  }
  for (auto& [token, l] : listeners_) ::close(l->fd());
  for (const int fd : arriving_ ? arriving_->descriptors() : std::vector<int>()) ::close(fd);
  users_.close();
  for (Descriptor* d : {&inner_, &outer_, &kick_, &park_bell_, &timer_, &nudge_}) ::close(d->release());
  struct Abandoned {  // never destroyed
    decltype(connections_) connections;
    decltype(listeners_) listeners;
    decltype(arriving_) arriving;
    decltype(peers_) peers;
    decltype(gathering_) gathering;
    decltype(awake_) awake;
    ConnectionPtr hot;
    std::thread timekeeper;
  };
  new Abandoned{std::move(connections_), std::move(listeners_), std::move(arriving_), std::move(peers_),
                std::move(gathering_),   std::move(awake_),     std::move(hot_),      std::move(timekeeper_)};
  gathering_.clear();  // the parent sends the messages that links hold
  gathering_since_ = kNever;
  connections_.clear();
  listeners_.clear();
  peers_.clear();
  idle_.clear();
  sleepers_.clear();
  progress_.clear();
  parked_ = nullptr;
  role_held_ = false;
  gate_.shut();
  forked_ = leaving_ = stopped_ = quit_ = true;
  stopping_ = true;
  calls_.for_each([](std::uint64_t, Call& call) {
    call.waiter = nullptr;
    if (call.status != CallStatus::kPending) return;
    call.status = CallStatus::kStopped;
    call.outcome = {.status = CallStatus::kStopped, .peer = call.peer, .why = kForked};
  });
  pool_->after_fork();
  mutex_.unlock();
}

}  // namespace telegrad
