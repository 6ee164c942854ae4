// Helpers of the transport tests: pairs of connected links, messages that own their bytes, and a recording inbox.
#pragma once

#include <poll.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "core/transport.h"
#include "memory/buffer_pool.h"
#include "tests/check.h"

namespace telegrad::test {

/// A message and the memory from which it is sent.
struct Message {
  FrameHeader header;
  std::string name;
  std::string body;
  std::vector<std::string> segments;

  /// An Outgoing that borrows this message's memory.
  Outgoing outgoing() const;
};

/// A message of pseudo-random content.
Message random_message(Random& random, std::size_t body, const std::vector<std::size_t>& segments = {},
                       std::size_t name = 0);
/// Checks that the received message equals the sent one, byte for byte, in aligned memory.
void check_same(const Message& sent, const Incoming& got);

class RecordingInbox final : public Inbox {
 public:
  BlockPtr allocate(std::size_t size) override;
  void deliver(Incoming&& message) override { messages.push_back(std::move(message)); }

  std::shared_ptr<BufferPool> pool = BufferPool::make(0);
  std::vector<Incoming> messages;
  int allocations = 0;
  std::size_t allocated = 0;
  std::size_t refuse_from = SIZE_MAX;  // throws std::bad_alloc for blocks of this size and more
};

/// Settings for sockets with any process as their peer.
inline PeerCredentials remote_credentials(int, CredentialLookup&) { return {.kind = PeerCredentials::Kind::kRemote}; }

/// Returns what the transport of an address needs to encrypt.
LinkSecurityPtr security_for(const std::string& address);
/// Listens and connects, also on encrypted addresses.
std::unique_ptr<Listener> listen_on(const std::string& address);
std::unique_ptr<Link> connect_to(const std::string& address);
/// Returns an unused address of a scheme, to listen on.
std::string fresh_address(const std::string& scheme);

/// Returns whether the descriptor polls for `events` within `timeout_ms`.
bool polls(int fd, short events, int timeout_ms);
inline bool readable(int fd, int timeout_ms = -1) { return polls(fd, POLLIN, timeout_ms); }
inline bool writable(int fd, int timeout_ms = -1) { return polls(fd, POLLOUT, timeout_ms); }

/// Returns the same for a link, with all of its descriptors.
bool polls(const Link& link, short events, int timeout_ms);
inline bool readable(const Link& link, int timeout_ms = -1) { return polls(link, POLLIN, timeout_ms); }
inline bool writable(const Link& link, int timeout_ms = -1) { return polls(link, POLLOUT, timeout_ms); }
/// Waits until one end can continue to send or the other has something to receive.
void wait_for_either(const Link& from, const Link& to);
/// Reads the available data, over lanes too.
ReceiveState receive(Link& link, Inbox& inbox, std::size_t budget);

/// Two ends of one link; `a` has connected, `b` was accepted. The scheme "lanes" is tcp with lanes, over which the
/// segments of all messages are striped in small fragments; "tls-lanes" is the same for tls.
struct Ends {
  explicit Ends(const std::string& scheme);
  std::unique_ptr<Listener> listener;
  std::unique_ptr<Link> a, b;

 private:
  void connect_lanes(bool encrypted);
};

constexpr std::size_t kAnyBudget = std::size_t{1} << 20;
constexpr std::size_t kMiB = std::size_t{1} << 20;

/// Completes the handshake of an encrypted link.
void shake_hands(Link& a, Link& b);
/// Sends one message while reading at the other end.
void send_whole(Link& from, const Message& message, Link& to, RecordingInbox& inbox);
/// Sends a message that may have been begun while reading at the other end.
void send_whole(Link& from, Outgoing& message, Link& to, RecordingInbox& inbox);
/// Reads until `count` messages have arrived since the inbox was empty.
void receive_until(Link& link, RecordingInbox& inbox, std::size_t count);
/// Reads until the link is broken.
void receive_until_broken(Link& link, RecordingInbox& inbox);
/// Sends messages of `size` bytes until the link blocks and stays blocked. The last one is the blocked message, which
/// the caller must continue to send.
struct Clogged {
  std::vector<Message> messages;
  std::vector<std::unique_ptr<Outgoing>> sent;
};
Clogged clog(Link& link, std::size_t size);

/// Forks and runs `meanwhile`; afterwards returns whether `check` was true in the child.
bool in_a_fork(const std::function<bool()>& check, const std::function<void()>& meanwhile);

}  // namespace telegrad::test
