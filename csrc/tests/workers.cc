#include "tests/workers.h"

#include <cstring>

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
  auto keep = std::make_unique<Bytes>(std::move(r.body), std::move(r.segments));
  keep->name = std::move(r.name);
  m->header.tag = r.tag;
  m->header.flags = r.flags;
  m->header.name_id = r.name_id;
  m->name = keep->name;
  m->body = keep->body;
  for (const auto& s : keep->segments) {
    m->segments.push_back({reinterpret_cast<const std::byte*>(s.data()), s.size()});
  }
  m->keep = std::move(keep);
  return m;
}

// ---- Worker

Settings Worker::settings_of(int id) {
  Settings s;
  s.credo.me = {.id = id, .name = "w" + std::to_string(id), .incarnation = static_cast<std::uint64_t>(1000 + id)};
  s.credo.group = "tests";
  s.credo.secret = "a secret";
  return s;
}

Worker::Worker(int id, Settings settings, int pool_threads) : id(id) {
  const Limits limits = settings.credo.limits;
  if (settings.credo.me.id < 0) settings.credo = settings_of(id).credo;
  settings.credo.limits = limits;
  engine = std::make_unique<Engine>(std::move(settings));
  add_threads(pool_threads);
}

Worker::~Worker() { stop(); }

std::string Worker::listen(const std::string& scheme) {
  addresses_.push_back(engine->listen(fresh_address(scheme)));
  return addresses_.back();
}

PeerAddress Worker::address() const { return {.identity = settings_of(id).credo.me, .addresses = addresses_}; }

void Worker::add_threads(int n) {
  std::lock_guard lock(threads_mutex_);
  for (int i = 0; i < n; ++i) threads_.emplace_back([this] { run_pool(); });
}

void Worker::stop(Nanos linger) {
  release.set();
  engine->stop(linger);
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
    Item item;
    if (!engine->next(self, item)) return;
    if (item.spawn) add_threads(1);
    if (item.kind == ItemKind::kRetire) return;
    handle(item);
  }
}

void Worker::handle(Item& item) {
  switch (item.kind) {
    case ItemKind::kOutcome: {
      std::lock_guard lock(mutex);
      if (item.cookie) {
        const int cookie = std::stoi(static_cast<Bytes&>(*item.cookie).body);
        CHECK(outcomes.emplace(cookie, std::move(item.outcome)).second);  // each arrives once
      } else {
        orphans.push_back(std::move(item.outcome));
      }
      outcome_count.add();
      return;
    }
    case ItemKind::kEvent: {
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
    case ItemKind::kRetire:
      return;
    case ItemKind::kRequest:
    case ItemKind::kOneway:
      break;
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
    case kCustom:
      return on_custom(item);
    default:
      return;
  }
}

void Worker::bounce(Item& item) {
  std::string body(item.message.body_view());
  if (body[0] > 0) {
    --body[0];
    const Outcome inner = call(item.peer, {.tag = kBounce, .body = body, .nested = true});
    CHECK(inner.status != CallStatus::kPending && inner.status != CallStatus::kTimedOut);
    body = body_of(inner);
  }
  answer(item, body + ".");
}

void Worker::answer(const Item& request, std::string body, std::vector<std::string> segments, std::uint16_t flags) {
  if (request.kind != ItemKind::kRequest) return;
  Request r{.body = std::move(body), .segments = std::move(segments), .flags = flags};
  engine->reply(request.connection, request.message.header.call_id, compose(r), true);
}

Outcome Worker::call(int peer, Request r) {
  CallOptions o;
  o.deadline = deadline_after(now(), r.timeout);
  o.nested = r.nested;
  o.linger = std::move(r.linger);
  const Nanos deadline = o.deadline;
  const std::uint64_t call = engine->start(peer, compose(r), std::move(o));
  Outcome outcome;
  const WaitEnd end = engine->wait(call, deadline, {}, outcome);
  if (end != WaitEnd::kDone) engine->give_up(call);
  if (end == WaitEnd::kDeadline) outcome.status = CallStatus::kTimedOut;
  if (end == WaitEnd::kStopped) outcome.status = CallStatus::kStopped;
  return outcome;
}

std::uint64_t Worker::start(int peer, int cookie, Request r) {
  CallOptions o;
  o.deadline = deadline_after(now(), r.timeout);
  o.nested = r.nested;
  o.never_wait = r.never_wait;
  o.lazy = o.aside = r.lazy;
  o.linger = std::move(r.linger);
  if (cookie >= 0) o.cookie = std::make_unique<Bytes>(std::to_string(cookie));
  return engine->start(peer, compose(r), std::move(o));
}

std::string Worker::wait_for_event(EventKind kind) {
  for (int seen = 0;; ++seen) {
    event_count.wait_for(seen + 1);
    std::lock_guard lock(mutex);
    if (const Item& e = events[static_cast<std::size_t>(seen)]; e.event == kind) return e.text;
  }
}

void introduce(std::initializer_list<Worker*> workers, const std::string& scheme) {
  for (Worker* w : workers) w->listen(scheme);
  for (Worker* w : workers) {
    for (const Worker* other : workers) w->meet(*other);
  }
}

// ---- Puppet

Puppet::Puppet(int id, const std::string& scheme) : credo(Worker::settings_of(id).credo) {
  const std::string address = fresh_address(scheme);
  listener = find_transport(address)->listen(address);
}

PeerAddress Puppet::address() const { return {.identity = credo.me, .addresses = {listener->address()}}; }

void Puppet::accept() {
  do {
    readable(listener->fd());
    link = listener->accept();
  } while (!link);
  shake(Handshake::accept(credo), false);
}

void Puppet::connect(const PeerAddress& peer) {
  link = find_transport(peer.addresses[0])->connect(peer.addresses[0]);
  shake(Handshake::initiate(credo, peer.identity), true);
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
    if (act(handshake.on_frame(m.header.type, m.body_view()))) break;
  }
  session = handshake.session();
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
  while ((state = link->send(out)) == SendState::kBlocked) writable(link->fd());
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
  for (const std::string scheme : {"shm", "unix", "tcp", "inproc"}) {
    add_case(scheme + "/" + name, [scheme, run] { run(scheme); }, slow);
  }
  return true;
}

std::string body_of(const Outcome& outcome) {
  if (outcome.status != CallStatus::kReplied) return "(" + outcome.why + ")";
  return std::string(outcome.reply.body_view());
}

std::string text_of(const BlockPtr& block) {
  return std::string(reinterpret_cast<const char*>(block->data()), block->size());
}

}  // namespace telegrad::test
