// Calls through the core alone: two engines, and one thread that is caller and callee in turn. No thread spins, sleeps
// or wakes, so a call takes the same instructions every time. Callgrind counts the instructions inside `counted` (see
// __init__.py).
//
//     calls CASE SCHEME TIMES
//
// CASE: plain (a body of 16 bytes, round trip), tensor (and a segment of 4 KB), async (the thread pool gets the
// completion).
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <thread>

#include "core/engine.h"

namespace {

using namespace telegrad;

enum Tag : std::uint8_t { kEcho = 1, kLast };

constexpr std::size_t kBody = 16, kSegment = 4096;

struct Target final : KeepAlive {};

[[noreturn]] void die(const std::string& what) {
  std::fprintf(stderr, "calls: %s\n", what.c_str());
  std::_Exit(1);
}

Settings settings_of(int id) {
  Settings s;
  s.handshake.me = {.id = id, .name = "w" + std::to_string(id), .incarnation = static_cast<std::uint64_t>(id + 1)};
  s.handshake.group = "instructions";
  s.handshake.secret = "a secret";
  return s;
}

std::string fresh_address(const std::string& scheme) {
  if (scheme == "tcp") return "tcp:127.0.0.1:0";
  const std::string name = "telegrad-instructions-" + std::to_string(getpid());
  return scheme + (scheme == "inproc" ? ":" : ":@") + name;
}

/// The two ends of one call after the other.
class Pair {
 public:
  Pair(const std::string& scheme, bool with_segment) : with_segment_(with_segment) {
    const std::string address = callee_.listen(fresh_address(scheme));
    caller_.set_peer({.identity = settings_of(1).handshake.me, .addresses = {address}});
    connect();
  }

  ~Pair() {
    caller_.stop(0);
    callee_.stop(0);
  }

  void call() {
    const std::uint64_t id = caller_.start(1, request(kEcho), {});
    answer(callee_pool_);
    Completion completion;
    if (caller_.wait(id, kNever, {}, completion) != WaitEnd::kDone || completion.status != CallStatus::kReplied) {
      die("a call failed: " + completion.why);
    }
  }

  void call_async() {
    CallOptions options;
    options.target = std::make_unique<Target>();
    caller_.start(1, request(kEcho), std::move(options));
    answer(callee_pool_);
    WorkItem item;
    bool working = caller_.next(caller_pool_, item);
    while (working && item.kind == WorkKind::kEvent) working = caller_.next(caller_pool_, item);  // connected
    if (!working || item.kind != WorkKind::kCompletion || item.status != CallStatus::kReplied) {
      die("an asynchronous call failed: " + item.text);
    }
  }

 private:
  std::unique_ptr<Outgoing> request(Tag tag) {
    auto m = message();
    m->header.tag = tag;
    return m;
  }

  std::unique_ptr<Outgoing> message() {
    auto m = std::make_unique<Outgoing>();
    m->body = {body_, kBody};
    if (with_segment_) m->segments.push_back({segment_, kSegment});
    return m;
  }

  /// Takes the next request at the callee and answers it; its tag.
  std::uint8_t answer(PoolThread& pool) {
    WorkItem item;
    do {
      item = WorkItem();
      if (!callee_.next(pool, item)) die("the callee has ended");
    } while (item.kind != WorkKind::kRequest);
    const std::uint8_t tag = item.message.header.tag;
    callee_.reply(item.connection, item.message.header.call_id, message(), false);
    return tag;
  }

  /// The first call makes the connection, and that takes two threads.
  void connect() {
    std::thread other([this] {
      PoolThread pool;
      while (answer(pool) != kLast) {
      }
    });
    for (const Tag tag : {kEcho, kLast}) {
      const std::uint64_t id = caller_.start(1, request(tag), {});
      Completion completion;
      if (caller_.wait(id, kNever, {}, completion) != WaitEnd::kDone || completion.status != CallStatus::kReplied) {
        die("cannot connect: " + completion.why);
      }
    }
    other.join();
  }

  const bool with_segment_;
  char body_[kBody] = {};
  std::byte segment_[kSegment] = {};
  Engine caller_{settings_of(0)}, callee_{settings_of(1)};
  PoolThread caller_pool_, callee_pool_;
};

}  // namespace

extern "C" [[gnu::noinline]] void counted(Pair& pair, bool async) {
  if (async) {
    pair.call_async();
  } else {
    pair.call();
  }
}

int main(int argc, char** argv) {
  if (argc != 4) die("see the first lines of calls.cc");
  const std::string which = argv[1];
  const bool async = which == "async";
  if (!async && which != "plain" && which != "tensor") die("no such case: " + which);
  Pair pair(argv[2], which == "tensor");
  for (int i = std::atoi(argv[3]); i > 0; --i) counted(pair, async);
  return 0;
}
