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

#include "base/fork_handlers.h"

namespace telegrad {
namespace {

UniqueFd check(int fd, const char* what) {
  if (fd < 0) throw std::system_error(errno, std::generic_category(), what);
  return UniqueFd(fd);
}

void add(const UniqueFd& epoll, int fd, std::uint64_t token, std::uint32_t events) {
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
      pool_(BufferPool::make(settings_.pool_cache)),
      multicast_arena_(std::make_shared<MulticastArena>(settings_.handshake.limits.leased)),
      links_epoll_(check(epoll_create1(EPOLL_CLOEXEC), "cannot create an epoll descriptor")),
      park_epoll_(check(epoll_create1(EPOLL_CLOEXEC), "cannot create an epoll descriptor")),
      interrupt_fd_(check(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "cannot create an eventfd")),
      park_fd_(check(eventfd(0, EFD_NONBLOCK | EFD_CLOEXEC), "cannot create an eventfd")),
      timer_fd_(check(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC), "cannot create a timerfd")),
      callback_fd_(check(timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC | TFD_NONBLOCK), "cannot create a timerfd")),
      spin_limit_(std::max(processors() / 2, 1)),
      caller_spin_(settings_.spin) {
  add(links_epoll_, interrupt_fd_.get(), kInterruptToken, EPOLLIN);
  add(links_epoll_, callback_fd_.get(), kCallbackToken, EPOLLIN);
  add(park_epoll_, links_epoll_.get(), kLinksToken, 0);
  add(park_epoll_, park_fd_.get(), kParkToken, EPOLLIN);
  timer_thread_ = std::thread([this] { run_timer(); });
  pthread_setname_np(timer_thread_.native_handle(), "telegrad-time");
  register_fork_handler(this, ForkLevel::kEngine);
}

Engine::~Engine() {
  unregister_fork_handler(this, ForkLevel::kEngine);
  stop(0);
  {
    std::lock_guard lock(mutex_);
    timer_stopped_ = true;
    timer_at_ = kNever;
    arm_timer(1);
  }
  if (timer_thread_.joinable()) timer_thread_.join();  // a forked child has none
  pool_->disable_cache();                              // holders of received memory must not keep the cache alive
}

void Engine::stop(Nanos keep_alive) {
  const Nanos deadline = now() + keep_alive;
  std::vector<ConnectionPtr> open;
  {
    std::lock_guard lock(mutex_);
    if (std::exchange(stop_begun_, true)) return;
  }
  Waiter w;
  auto nothing_waits = [&] {
    return std::none_of(peers_.begin(), peers_.end(),
                        [](const auto& p) { return p.second.connecting && !p.second.pending.empty(); });
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
    Transmission p{.connection = c};
    if (transmit(c, m, p) == SendResult::kQueued) wait_until_sent(c->peer, p, deadline, {});
  }
  for (auto& c : open) close_connection(c, "this worker has been shut down");
  Released released;
  Lock lock(mutex_);
  stopped_ = true;
  calls_.for_each([&](std::uint64_t id, Call&) {
    complete(id, Completion{.status = CallStatus::kStopped, .why = "this worker has been shut down"}, released);
  });
  for (auto& [id, peer] : peers_) unreachable(peer, "this worker has been shut down", released);
  for (auto& [id, l] : keep_alives_) released.push_back(std::move(l.owner));
  keep_alives_.clear();
  listeners_.clear();
  flush_deferred();
  for (PoolThread* t : idle_) t->parker.notify();
  for (Waiter* sleeper : sleeping_callers_) sleeper->parker.notify();
  notify_parked();
  interrupt_poll();
  lock.unlock();
  released.clear();
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
  s.multicast_buffers = multicast_arena_->stats().buffers;
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
  for (const int fd : accepting_ ? accepting_->descriptors() : std::vector<int>()) ::close(fd);
  users_.close();
  for (UniqueFd* d : {&links_epoll_, &park_epoll_, &interrupt_fd_, &park_fd_, &timer_fd_, &callback_fd_})
    ::close(d->release());
  struct Abandoned {  // never destroyed
    decltype(connections_) connections;
    decltype(listeners_) listeners;
    decltype(accepting_) accepting;
    decltype(peers_) peers;
    decltype(coalescing_) coalescing;
    decltype(busy_polled_) busy_polled;
    ConnectionPtr hot;
    std::thread timer_thread;
  };
  new Abandoned{std::move(connections_), std::move(listeners_),   std::move(accepting_),   std::move(peers_),
                std::move(coalescing_),  std::move(busy_polled_), std::move(last_active_), std::move(timer_thread_)};
  coalescing_.clear();  // the parent sends the messages that links hold
  coalescing_since_ = kNever;
  connections_.clear();
  listeners_.clear();
  peers_.clear();
  idle_.clear();
  sleeping_callers_.clear();
  progress_.clear();
  parked_ = nullptr;
  has_leader_ = false;
  handoff_.end_term();
  forked_ = stop_begun_ = stopped_ = timer_stopped_ = true;
  stopping_ = true;
  calls_.for_each([](std::uint64_t, Call& call) {
    call.waiter = nullptr;
    if (call.status != CallStatus::kPending) return;
    call.status = CallStatus::kStopped;
    call.completion = {.status = CallStatus::kStopped, .peer = call.peer, .why = kForked};
  });
  pool_->after_fork();
  mutex_.unlock();
}

}  // namespace telegrad
