// Helpers of the engine tests: a worker, which is an engine with pool threads and a few handlers, and a puppet, which
// is a peer with frames that the test sends and reads itself.
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

/// Handlers of a Worker, by tag.
enum Tag : std::uint8_t {
  kEcho = 1,  // replies with the same body and segments
  kHold,      // replies with an echo once `release` is set
  kBounce,    // calls its caller with the first byte of the body reduced by one, until that is 0
  kCustom,    // `on_custom`
  kNoAnswer,  // never answers
};

/// Bytes of an outgoing message or a completion target. Counts its live instances.
struct Bytes final : KeepAlive {
  explicit Bytes(std::string body = {}, std::vector<std::string> segments = {}, std::function<void()> gone = {});
  ~Bytes() override;
  std::string name, body;
  std::vector<std::string> segments;
  std::function<void()> gone;
  std::function<bool()> unchanged;
  bool is_unchanged() const override { return unchanged && unchanged(); }
  static std::atomic<int> live;
};

struct Request {  // parameters of a call
  std::uint8_t tag = kEcho;
  std::string body = {};
  std::vector<std::string> segments = {};
  Nanos timeout = 0;
  bool nested = false;
  std::uint32_t depth = 0;
  bool never_wait = false;
  bool background = false;
  bool polled = false;
  std::uint16_t flags = 0;
  std::uint32_t name_id = 0;
  std::string name = {};
  std::unique_ptr<KeepAlive> keep_alive = nullptr;
  std::function<bool()> unchanged = {};  // makes the message verifiable
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

  /// Makes a blocking call, like the bindings.
  Completion call(int peer, Request call);
  /// Makes an asynchronous call; its completion will be in `completions` under the number of its target. Without a
  /// target (-1), a thread must wait for the call.
  std::uint64_t start(int peer, int target, Request call);
  /// Starts `n` more pool threads.
  void add_threads(int n);
  void stop(Nanos keep_alive = kSecond);

  const int id;
  std::unique_ptr<Engine> engine;
  Event release;
  std::atomic<bool> starts_threads = true;  // false: as while user code holds the GIL, no thread can be started
  // Set before the first connection, or under `mutex`: the sanitizer does not see that a message of shared memory
  // orders its sender before its receiver.
  std::function<void(WorkItem&)> on_custom;
  // Processes an event of a session; acknowledges it by default.
  std::function<void(const WorkItem&)> on_session_event = [this](const WorkItem& item) {
    engine->acknowledge(item.peer);
  };

  Counter completion_count;  // completions that the pool got, with or without a target
  Counter event_count;
  Counter link_count;  // events of first connections to peers, counted separately
  Counter handled;     // requests started
  Counter left_out;    // requests without content, which were not started
  Counter cancel_count;
  std::mutex mutex;
  std::map<int, Completion> completions;
  std::vector<Completion> orphans;  // completions without a target
  std::vector<WorkItem> events;
  std::vector<std::uint64_t> canceled;  // calls of the kCancel items
  std::vector<std::string> links;       // texts of the events of first connections

  void answer(const WorkItem& request, std::string body, std::vector<std::string> segments = {},
              std::uint16_t flags = 0);
  /// Waits for the first event of a kind and returns its text.
  std::string wait_for_event(EventKind kind);

 private:
  void run_pool();
  void handle(WorkItem& item);
  void bounce(WorkItem& item);

  std::vector<std::string> addresses_;
  std::mutex threads_mutex_;
  std::deque<std::thread> threads_;
};

/// Gives every worker the addresses of all others; each listens on `scheme`.
void introduce(std::initializer_list<Worker*> workers, const std::string& scheme);

/// Returns the answer to a frame of a handshake, without a decision on its session.
Handshake::Step advance(Handshake& handshake, FrameType type, std::string_view body);

class Puppet {
 public:
  /// Listens as worker `id`.
  explicit Puppet(int id, const std::string& scheme = "unix");
  PeerAddress address() const;
  /// Accepts the connection of `peer` and completes the handshake.
  void accept();
  /// Makes the worker connect, accepts it, and replies to its first call.
  void meet(Worker& worker);
  /// Connects to a worker and completes the handshake, except that it does not wait for the welcome.
  void prove(const PeerAddress& peer);
  /// Connects to a worker and completes the handshake.
  void connect(const PeerAddress& peer);

  Incoming receive();
  void send(const Message& message);
  void reply(const Incoming& request, std::string body, std::uint16_t flags = 0);
  /// Waits until the other end has closed the link; discards its frames.
  void wait_for_end();

  HandshakeConfig config;
  std::unique_ptr<Listener> listener;
  std::unique_ptr<Link> link;
  std::string link_name;

 private:
  void shake(Handshake handshake, bool begins);
  RecordingInbox inbox_;
  std::size_t read_ = 0;
  std::uint64_t dials_ = 0;
};

/// Makes a message of a type.
Message message(FrameType type, std::string body = {}, std::uint64_t call = 0);

/// Registers `run(scheme)` as a case for each scheme.
bool on_every_scheme(const char* name, void (*run)(const std::string&), bool slow = false);
#define CASE_ON_EVERY_SCHEME(name)                                                     \
  static void name(const std::string& scheme);                                         \
  [[maybe_unused]] static const bool name##_registered = on_every_scheme(#name, name); \
  static void name(const std::string& scheme)

std::string body_of(const Completion& completion);
std::string text_of(const BlockPtr& block);

}  // namespace telegrad::test
