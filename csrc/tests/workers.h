// What the engine tests share: a worker, which is an engine with pool threads and a few handlers, and a puppet, which
// is a peer whose every frame the test sends and reads by hand.
#pragma once

#include <deque>
#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "core/engine.h"
#include "tests/links.h"

namespace telegrad::test {

/// What the handlers of a Worker do, by tag.
enum Tag : std::uint8_t {
  kEcho = 1,  // the same body and segments back
  kHold,      // an echo, once `release` is set
  kBounce,    // calls its caller back, with one less in the first byte of the body, until that is 0
  kCustom,    // `on_custom`
  kNoAnswer,  // never answers
};

/// Bytes of an outgoing message or a cookie. Counts how many of its kind live.
struct Bytes final : Keep {
  explicit Bytes(std::string body = {}, std::vector<std::string> segments = {}, std::function<void()> gone = {});
  ~Bytes() override;
  std::string name, body;
  std::vector<std::string> segments;
  std::function<void()> gone;
  static std::atomic<int> live;
};

struct Request {  // how to make a call
  std::uint8_t tag = kEcho;
  std::string body = {};
  std::vector<std::string> segments = {};
  Nanos timeout = 0;
  bool nested = false;
  bool never_wait = false;
  bool lazy = false;
  std::uint16_t flags = 0;
  std::uint32_t name_id = 0;
  std::string name = {};
  std::unique_ptr<Keep> linger = nullptr;
};

std::unique_ptr<Outgoing> compose(Request& call);

class Worker {
 public:
  explicit Worker(int id, Settings settings = {}, int pool_threads = 2);
  ~Worker();

  static Settings settings_of(int id);
  PeerAddress address() const;
  std::string listen(const std::string& scheme);
  void meet(const Worker& other) { engine->set_peer(other.address()); }

  /// A call that waits, as the bindings make it.
  Outcome call(int peer, Request call);
  /// An async call; its outcome will be in `outcomes` under the cookie. Without one (-1), somebody has to wait for it.
  std::uint64_t start(int peer, int cookie, Request call);
  /// Starts `n` more pool threads.
  void add_threads(int n);
  void stop(Nanos linger = kSecond);

  const int id;
  std::unique_ptr<Engine> engine;
  Event release;
  std::function<void(Item&)> on_custom;

  Counter outcome_count;  // outcomes that came to the pool, cookie or not
  Counter event_count;
  Counter link_count;  // events of first links to peers, which do not count as others
  Counter handled;     // requests begun
  std::mutex mutex;
  std::map<int, Outcome> outcomes;
  std::vector<Outcome> orphans;  // outcomes without a cookie
  std::vector<Item> events;
  std::vector<std::string> links;  // what these say

  void answer(const Item& request, std::string body, std::vector<std::string> segments = {}, std::uint16_t flags = 0);
  /// The text of the first event of a kind; waits for it.
  std::string wait_for_event(EventKind kind);

 private:
  void run_pool();
  void handle(Item& item);
  void bounce(Item& item);

  std::vector<std::string> addresses_;
  std::mutex threads_mutex_;
  std::deque<std::thread> threads_;
};

/// Every worker learns every other's address; each listens on `scheme`.
void introduce(std::initializer_list<Worker*> workers, const std::string& scheme);

class Puppet {
 public:
  /// Listens as worker `id`.
  explicit Puppet(int id, const std::string& scheme = "unix");
  PeerAddress address() const;
  /// Takes the connection that `peer` makes, and goes through the handshake.
  void accept();
  /// Connects to a worker, and goes through the handshake.
  void connect(const PeerAddress& peer);

  Incoming receive();
  void send(const Message& message);
  void reply(const Incoming& request, std::string body, std::uint16_t flags = 0);
  /// Waits until the other end has closed the link; what it sent before that is dropped.
  void wait_for_end();

  Credo credo;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<Link> link;
  std::string session;  // of the link

 private:
  void shake(Handshake handshake, bool begins);
  Collector inbox_;
  std::size_t read_ = 0;
};

/// A message of a type.
Message message(FrameType type, std::string body = {}, std::uint64_t call = 0);

/// Registers `run(scheme)` as a case for each scheme.
bool on_every_scheme(const char* name, void (*run)(const std::string&), bool slow = false);
#define CASE_ON_EVERY_SCHEME(name)                                                     \
  static void name(const std::string& scheme);                                         \
  [[maybe_unused]] static const bool name##_registered = on_every_scheme(#name, name); \
  static void name(const std::string& scheme)

std::string body_of(const Outcome& outcome);
std::string text_of(const BlockPtr& block);

}  // namespace telegrad::test
