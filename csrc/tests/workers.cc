#include "tests/workers.h"

#include <cstring>

#include "base/crypto.h"

namespace telegrad::test {

std::atomic<int> Bytes::live = 0;

Bytes::Bytes(std::string b, std::vector<std::string> s, std::function<void()> g)
    : body(std::move(b)), segments(std::move(s)), gone(std::move(g)) {
  ++live;
}

Bytes::~Bytes() {
  if (gone) gone();
  --live;
}

std::unique_ptr<Outgoing> compose(Request& r) {
  auto m = std::make_unique<Outgoing>();
  auto owner = std::make_unique<Bytes>(std::move(r.body), std::move(r.segments));
  owner->name = std::move(r.name);
  m->verifiable = r.unchanged != nullptr;
  owner->unchanged = std::move(r.unchanged);
  m->header.tag = r.tag;
  m->header.flags = r.flags;
  m->header.name_id = r.name_id;
  m->name = owner->name;
  m->body = owner->body;
  for (const auto& s : owner->segments) {
    m->segments.push_back({reinterpret_cast<const std::byte*>(s.data()), s.size()});
  }
  m->owner = std::move(owner);
  return m;
}

// ---- Worker

namespace {
std::string scheme_of_case;  // of CASE_ON_EVERY_SCHEME: the engines of its workers encrypt if it is "tls"
}

Settings Worker::settings_of(int id) {
  Settings s;
  s.handshake.me = {.id = id, .name = "w" + std::to_string(id), .incarnation = static_cast<std::uint64_t>(1000 + id)};
  s.handshake.group = "tests";
  s.handshake.secret = "a secret";
  return s;
}

Worker::Worker(int id, Settings settings, int pool_threads) : id(id) {
  const Limits limits = settings.handshake.limits;
  if (settings.handshake.me.id < 0) settings.handshake = settings_of(id).handshake;
  settings.handshake.limits = limits;
  if (!settings.security) settings.security = security_for(scheme_of_case);
  engine = std::make_unique<Engine>(std::move(settings));
  add_threads(pool_threads);
}

Worker::~Worker() { stop(); }

std::string Worker::listen(const std::string& scheme) {
  addresses_.push_back(engine->listen(fresh_address(scheme)));
  return addresses_.back();
}

PeerAddress Worker::address() const { return {.identity = settings_of(id).handshake.me, .addresses = addresses_}; }

void Worker::add_threads(int n) {
  std::lock_guard lock(threads_mutex_);
  for (int i = 0; i < n; ++i) threads_.emplace_back([this] { run_pool(); });
}

void Worker::stop(Nanos keep_alive) {
  release.set();
  engine->stop(keep_alive);
  while (true) {
    std::thread t;
    {
      std::lock_guard lock(threads_mutex_);
      if (threads_.empty()) return;
      t = std::move(threads_.front());
      threads_.pop_front();
    }
    t.join();
  }
}

void Worker::run_pool() {
  PoolThread self;
  while (true) {
    WorkItem item;
    if (!engine->next(self, item)) return;
    if (item.needs_thread && starts_threads) add_threads(1);
    if (item.kind == WorkKind::kExitThread) return;
    handle(item);
  }
}

void Worker::handle(WorkItem& item) {
  switch (item.kind) {
    case WorkKind::kCompletion: {
      std::lock_guard lock(mutex);
      if (item.target) {
        const int target = std::stoi(static_cast<Bytes&>(*item.target).body);
        CHECK(completions.emplace(target, item.take_completion()).second);  // each arrives once
      } else {
        orphans.push_back(item.take_completion());
      }
      completion_count.add();
      return;
    }
    case WorkKind::kEvent: {
      const bool of_session = item.event == EventKind::kPeerLost || item.event == EventKind::kPeerLeft ||
                              item.event == EventKind::kPeerBack;
      if (of_session) on_session_event(item);
      std::lock_guard lock(mutex);
      if (item.event == EventKind::kConnected) {
        links.push_back(std::move(item.text));
        link_count.add();
        return;
      }
      events.push_back(std::move(item));
      event_count.add();
      return;
    }
    case WorkKind::kCancel: {
      std::lock_guard lock(mutex);
      canceled.push_back(item.message.header.call_id);
      cancel_count.add();
      return;
    }
    case WorkKind::kVerify:
      return engine->verify(item);
    case WorkKind::kExitThread:
    case WorkKind::kNoWork:
      return;
    case WorkKind::kRequest:
    case WorkKind::kOneway:
      break;
  }
  if (item.message.header.flags & kLeftOut && item.message.header.tag != kCustom) {
    answer(item, std::string(item.message.body_view()), {}, kLeftOut);
    left_out.add();
    return;
  }
  handled.add();
  switch (item.message.header.tag) {
    case kHold:
      release.wait();
      [[fallthrough]];
    case kEcho: {
      std::vector<std::string> segments;
      for (const auto& s : item.message.segments) segments.push_back(text_of(s));
      return answer(item, std::string(item.message.body_view()), std::move(segments));
    }
    case kBounce:
      return bounce(item);
    case kCustom: {
      std::unique_lock lock(mutex);
      const auto custom = on_custom;
      lock.unlock();
      return custom(item);
    }
    default:
      return;
  }
}

void Worker::bounce(WorkItem& item) {
  std::string body(item.message.body_view());
  if (body[0] > 0) {
    --body[0];
    const Completion inner = call(item.peer, {.tag = kBounce, .body = body, .nested = true});
    CHECK(inner.status != CallStatus::kPending && inner.status != CallStatus::kTimedOut);
    body = body_of(inner);
  }
  answer(item, body + ".");
}

void Worker::answer(const WorkItem& request, std::string body, std::vector<std::string> segments, std::uint16_t flags) {
  if (request.kind != WorkKind::kRequest) return;
  Request r{.body = std::move(body), .segments = std::move(segments), .flags = flags};
  engine->reply(request.connection, request.message.header.call_id, compose(r), true);
}

Completion Worker::call(int peer, Request r) {
  CallOptions o;
  o.deadline = deadline_after(now(), r.timeout);
  o.nested = r.nested;
  o.depth = r.depth;
  o.waits = true;
  o.keep_alive = std::move(r.keep_alive);
  const Nanos deadline = o.deadline;
  const std::uint64_t call = engine->start(peer, compose(r), std::move(o));
  Completion completion;
  WaitEnd end = engine->wait(call, deadline, {}, completion);
  if (end == WaitEnd::kDeadline) end = engine->expire(call, {}, completion);
  if (end != WaitEnd::kDone) engine->give_up(call);
  if (end == WaitEnd::kStopped) completion.status = CallStatus::kStopped;
  return completion;
}

std::uint64_t Worker::start(int peer, int target, Request r) {
  CallOptions o;
  o.deadline = deadline_after(now(), r.timeout);
  o.nested = r.nested;
  o.depth = r.depth;
  o.never_wait = r.never_wait;
  o.background = o.deferrable = r.background;
  o.polled = r.polled;
  o.keep_alive = std::move(r.keep_alive);
  if (target >= 0) o.target = std::make_unique<Bytes>(std::to_string(target));
  return engine->start(peer, compose(r), std::move(o));
}

std::string Worker::wait_for_event(EventKind kind) {
  for (int seen = 0;; ++seen) {
    event_count.wait_for(seen + 1);
    std::lock_guard lock(mutex);
    if (const WorkItem& e = events[static_cast<std::size_t>(seen)]; e.event == kind) return e.text;
  }
}

void introduce(std::initializer_list<Worker*> workers, const std::string& scheme) {
  for (Worker* w : workers) w->listen(scheme);
  for (Worker* w : workers) {
    for (const Worker* other : workers) w->meet(*other);
  }
}

// ---- Puppet

Puppet::Puppet(int id, const std::string& scheme) : config(Worker::settings_of(id).handshake) {
  const std::string address = fresh_address(scheme);
  listener = listen_on(address);
}

PeerAddress Puppet::address() const { return {.identity = config.me, .addresses = {listener->address()}}; }

void Puppet::accept() {
  do {
    readable(listener->fd());
    link = listener->accept();
  } while (!link);
  shake(Handshake::accept(config), false);
}

Handshake::Step advance(Handshake& handshake, FrameType type, std::string_view body) {
  Handshake::Step step = handshake.on_frame(type, body);
  return step.proven ? handshake.proceed() : step;
}

void Puppet::meet(Worker& worker) {
  worker.engine->set_peer(address());
  std::thread puppet([&] {
    accept();
    reply(receive(), "hello");
  });
  CHECK_EQ(body_of(worker.call(config.me.id, {})), "hello");
  puppet.join();
}

void Puppet::connect(const PeerAddress& peer) {
  link = connect_to(peer.addresses[0]);
  shake(Handshake::initiate(config, peer.identity, {.number = ++dials_, .previous = {}}), true);
}

void Puppet::prove(const PeerAddress& peer) {
  link = connect_to(peer.addresses[0]);
  Handshake handshake = Handshake::initiate(config, peer.identity, {.number = ++dials_, .previous = {}});
  Handshake::Step step = handshake.begin();
  while (true) {
    send(message(*step.send, step.body));
    if (*step.send == FrameType::kConfirm) return;
    const Incoming answer = receive();
    step = advance(handshake, answer.header.type, answer.body_view());
  }
}

void Puppet::shake(Handshake handshake, bool begins) {
  auto act = [&](const Handshake::Step& step) {
    CHECK_EQ(step.failed, "");
    if (step.send) send(message(*step.send, step.body));
    return step.open;
  };
  if (begins) act(handshake.begin());
  while (true) {
    const Incoming m = receive();
    if (act(advance(handshake, m.header.type, m.body_view()))) break;
  }
  link_name = handshake.link();
}

Incoming Puppet::receive() {
  while (true) {
    receive_until(*link, inbox_, read_ + 1);
    Incoming& m = inbox_.messages[read_++];
    if (m.header.type != FrameType::kCredit) return std::move(m);
  }
}

void Puppet::send(const Message& m) {
  Outgoing out = m.outgoing();
  SendState state;
  while ((state = link->send(out)) == SendState::kBlocked) {
    polls(link->fd(), POLLIN | POLLOUT, -1);
    link->receive(inbox_, 1 << 20);  // TLS sends nothing before it has read the answer of its handshake
  }
  CHECK(state == SendState::kSent);
}

void Puppet::reply(const Incoming& request, std::string body, std::uint16_t flags) {
  Message m = message(FrameType::kReply, std::move(body), request.header.call_id);
  m.header.flags = flags;
  send(m);
}

void Puppet::wait_for_end() { receive_until_broken(*link, inbox_); }

// ---- helpers

Message message(FrameType type, std::string body, std::uint64_t call) {
  Message m;
  m.header.type = type;
  m.header.call_id = call;
  m.body = std::move(body);
  return m;
}

bool on_every_scheme(const char* name, void (*run)(const std::string&), bool slow) {
  for (const std::string scheme : {"shm", "unix", "tcp", "tls", "inproc"}) {
    if (scheme == "tls" && !has_crypto()) continue;
    const auto run_on = [scheme, run] {
      scheme_of_case = scheme;
      run(scheme);
      scheme_of_case.clear();
    };
    add_case(scheme + "/" + name, run_on, slow);
  }
  return true;
}

std::string body_of(const Completion& completion) {
  if (completion.status != CallStatus::kReplied) return "(" + completion.why + ")";
  return std::string(completion.reply.body_view());
}

std::string text_of(const BlockPtr& block) {
  return std::string(reinterpret_cast<const char*>(block->data()), block->size());
}

}  // namespace telegrad::test
