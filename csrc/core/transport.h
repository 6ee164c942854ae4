// The transport contract. A new transport implements these three classes, gets a scheme in transports/registry.cc, and
// is added to the list in csrc/tests/transport_suite.h, where the conformance suite checks every sentence below.
//
// A link moves whole messages between two ends, each exactly once, until it breaks. They arrive in order, but others
// may overtake a large message (core/delivery_order.h). It knows nothing of calls, peers or Python, and has no pointer
// to the layers above. Two operations end an object:
//     close()      never blocks, may be called from any thread and more than once; the other end is notified
//     destructor   releases memory; called when no other thread is inside the object
// (The engine implements stopping, which blocks: it closes links and waits for its threads.)
//
// Memory. A link sends directly from the memory of an Outgoing and keeps no pointer to it after kSent, unless it takes
// the owner of that memory (core/resumable.h). It fills blocks from `Inbox::allocate`.
//
// A link that shares memory with its peer may lease some to its sender (`Link::lease`). A segment that names the lease
// (OutSegment::lease) and resides in that memory is not copied: the link sends its location (SegmentHeader::lease), and
// the receiver maps the region and delivers it as a readable and writable block. The sender gives up the memory: after
// the message is sent, no thread accesses the sender's block, and it is destroyed. A lease is passed on once; memory
// that cannot be passed on is copied. The receiver's block returns the region when it is destroyed, on any thread. Then
// the region can be leased again. Blocks stay readable after the link is closed and destroyed. Leased memory is
// bounded: if regions are not returned, `lease` returns nothing and the sender sends bytes. It never waits for a
// region.
//
// A received block may have a lease too (Block::lease). With this lease, a message that is its only holder returns the
// memory over the link without a copy (zero-copy return). The peer gets its own memory back as a block.
//
// Data for several peers is in memory once (OutSegment::multicast, memory/multicast_arena.h). A link that can share
// this memory passes it on instead of the bytes; the receiver may still write to its block. Any other link sends the
// bytes.
//
// After fork(), leased and received memory is valid in both processes, as separate copies.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/clock.h"
#include "base/peer_credentials.h"
#include "core/link_error.h"
#include "core/link_security.h"
#include "core/message.h"
#include "core/resumable.h"
#include "memory/memory_budget.h"

namespace telegrad {

/// Destination of received data. Called only inside `Link::receive`, on the calling thread.
class Inbox : public BlockSource {
 public:
  /// Takes ownership of one complete message.
  virtual void deliver(Incoming&& message) = 0;
};

enum class SendState {
  kSent,     // the whole message has been sent; its memory may change now
  kBlocked,  // the peer must read first, or other links are due after a large part: call again with the same message
             // when the link is writable
  kBroken,   // the link has failed. `receive` still delivers what had arrived before it reports kBroken: let it report
             // the error
};

enum class ReceiveState {
  kIdle,    // nothing to read now
  kMore,    // the budget is used up; more data may be available
  kToSend,  // nothing to read now, but the sender can continue: call `flush`, then `send` with the blocked message
  kBroken,  // the link has failed or the other end has closed; `error()` has the reason
};

class Link {
 public:
  virtual ~Link() = default;

  /// Returns a descriptor that polls readable when `receive` has work, and writable (polled only after kBlocked, or
  /// while connecting) when `send` has. Constant for the life of the link.
  virtual int fd() const = 0;

  /// Sends as much of `message` as is possible without blocking, directly from its memory. One thread at a time (the
  /// caller serializes); may run concurrently with `receive`. After kBlocked the next send must be of the same message.
  /// Never throws.
  virtual SendState send(Outgoing& message) = 0;

  /// After kBlocked: returns whether the link can send more of the message now, and has only let others send before.
  virtual bool may_continue() const { return false; }

  /// Returns whether the link sends a message in parts: after kBlocked, `send_between` sends others between them.
  virtual bool is_large([[maybe_unused]] const Outgoing& message) const { return false; }

  /// Sends a message that is not large, like `send`, while a large one is blocked. After kBlocked the next call must be
  /// for the same message, before `send` continues with the large one.
  virtual SendState send_between(Outgoing& message) { return send(message); }

  /// Returns whether `send_between` takes messages. If not, send the rest of the large one; `receive` returns kToSend
  /// once this changes.
  virtual bool takes_between() { return true; }

  /// Copies a small message into a buffer, which the next `send` or `flush` sends. Returns false if the message is
  /// too large or the buffer is full; the caller then sends it. One thread at a time, as for `send`. Never throws.
  virtual bool buffer([[maybe_unused]] const Outgoing& message) { return false; }

  /// Sends the buffered messages. After kBlocked, as for `send`, call again when the link is writable.
  virtual SendState flush() { return SendState::kSent; }

  /// Returns whether the link itself sends a large message again (Resumable). Call `flush` when it is writable; others
  /// are sent meanwhile.
  virtual bool sends_again() const { return false; }

  /// Leases `size` bytes of the link's memory. Returns nothing if the link has no memory to lease, all of it is in use,
  /// or it is allocated only after this first request of its size. Any thread; never blocks, never throws.
  virtual std::optional<LinkLease> lease([[maybe_unused]] std::size_t size) { return std::nullopt; }

  /// Announces a multicast buffer to the peer (OutSegment::multicast) if the link can share its memory. Returns whether
  /// the peer knows the buffer. Any thread; never blocks, never throws.
  virtual bool announce([[maybe_unused]] const MulticastBuffer& multicast) { return false; }

  /// Returns the bytes of memory that the link keeps for leases.
  virtual std::size_t lease_capacity() const { return 0; }

  /// Releases the part of that memory that has not been used since `before`. Any thread; never blocks.
  virtual void trim([[maybe_unused]] Nanos before) {}

  /// Reads available data without blocking, about `budget` bytes at most, into memory from `inbox`. One thread at a
  /// time. A frame over the limits, or a malformed one, breaks the link before any allocation for it. A request or
  /// reply for which there is no memory is delivered without its content (Incoming::discarded), its leases are
  /// returned, and the link continues. Never throws.
  virtual ReceiveState receive(Inbox& inbox, std::size_t budget) = 0;

  /// Enables busy polling, if messages arrive through memory and can be polled without a system call. Afterwards the
  /// receiving thread calls `ready`, and `fd` need not signal messages; it still signals all else, above all the end of
  /// the link. Returns false if the link supports only its `fd`. Receiving thread only, as for the next two.
  virtual bool enable_busy_poll() { return false; }

  /// While busy polled: returns whether `receive` has work that `fd` need not signal. No system call.
  virtual bool ready() { return true; }

  /// Ends busy polling: `fd` signals everything again, as initially. Returns false if a message is available; the link
  /// is then still busy polled.
  virtual bool arm_wakeup() { return true; }

  /// Returns whether the link wants lanes now: more connections to the same end, over which it may stripe large
  /// messages. The engine asks periodically at the end that initiated the connection. It connects lanes like links,
  /// with a handshake that proves the identity of the peer, and adds them to the links at both ends. Receiving thread
  /// only, as for the next three.
  virtual bool wants_lanes() const { return false; }

  /// Adds a link to the same end, of the same transport, and with no other user. A lane that breaks also breaks the
  /// link. Returns false if the link is closed or has no use for the lane.
  virtual bool add_lane([[maybe_unused]] std::shared_ptr<Link> lane) { return false; }

  /// Returns the number of lanes.
  virtual std::size_t lanes() const { return 0; }

  /// Returns a second descriptor once the link has lanes, else -1. It polls readable when `receive` has work that `fd`
  /// does not signal, or `send` after kBlocked. The caller then calls `poll_lanes` first.
  virtual int lanes_fd() const { return -1; }
  virtual void poll_lanes() {}

  /// After kBlocked: returns whether `fd` signals when to send again. Otherwise `lanes_fd` or `receive` (kToSend) does.
  virtual bool waits_for_fd() const { return true; }

  /// Returns every descriptor of the link, for a forked child to close.
  virtual std::vector<int> descriptors() const { return {fd()}; }

  /// Sets the limits of frames. Called inside `Inbox::deliver` or before the first `receive`.
  virtual void set_limits(const Limits& limits) = 0;

  /// Sets the budget of the memory that the link shares with the other end. Called before the first `receive`.
  virtual void set_budget([[maybe_unused]] const std::shared_ptr<MemoryBudget>& budget) {}

  /// Closes the link in both directions. Messages reported as kSent are still delivered if the other end reads.
  virtual void close() = 0;

  /// Returns how many bytes have arrived from the other end, in any part of a message. Any thread.
  virtual std::uint64_t received_bytes() const = 0;

  /// Returns how many bytes of sent replies are in shared memory because the other end has not read them yet; small
  /// ones may be left out. Any thread.
  virtual std::uint64_t unread_bytes() const { return 0; }

  /// Has the kernel break the link when the host of the other end has been silent for this long; 0: for as long as the
  /// system says. For links between hosts.
  virtual void set_silence_limit([[maybe_unused]] Nanos limit) {}

  /// Returns why the link broke. Valid after kBroken.
  virtual LinkError error() const = 0;

  /// Returns whether the link broke because of what the other end sent, or for lack of memory for it. Valid after
  /// kBroken.
  virtual bool violated() const { return false; }

  /// Returns null if the link ends with its connection.
  virtual Resumable* resumable() { return nullptr; }

  /// Returns the user at the other end. Called before any other use of the link. Makes a few system calls, and opens no
  /// descriptor except those of `lookup`.
  virtual PeerCredentials peer_credentials(CredentialLookup& lookup) const = 0;

  /// Returns the machine at the other end, for limits per machine: an IPv4 address or an IPv6 network; "": this host.
  virtual std::string source() const { return {}; }

  /// Returns whether the other end may be the worker of this name. False if its certificate names another one.
  virtual bool is_certified_for([[maybe_unused]] std::string_view name) const { return true; }

  /// Names the worker at the other end. The handshake's initiator expects it, for the acceptor it is proven.
  virtual void set_peer_name([[maybe_unused]] std::string_view name) {}

  /// Returns a description for logs and errors: "unix", "tcp 10.0.0.1:5000 -> 10.0.0.2:6000".
  virtual std::string describe() const = 0;
};

class Listener {
 public:
  virtual ~Listener() = default;
  virtual int fd() const = 0;                  // readable when a connection can be accepted
  virtual std::unique_ptr<Link> accept() = 0;  // never blocks; null if no connection is pending; never throws
  virtual std::string address() const = 0;     // for `connect` at the peer, with the scheme
  /// Returns whether the last `accept` has left a connection pending for lack of descriptors or memory: `fd` stays
  /// readable.
  virtual bool is_stuck() const { return false; }
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Opens a listener. Throws std::system_error that names the address. Never blocks.
  virtual std::unique_ptr<Listener> listen(const std::string& address, const LinkSecurityPtr& security = {}) = 0;
  /// Starts connecting; never blocks. The returned link may still be connecting: then it polls writable when done, and
  /// until then `send` returns kBlocked or kBroken. Throws std::system_error if connecting fails at once; EAGAIN means
  /// that the caller should try again. On an encrypted link, this end sends first: nothing arrives before.
  virtual std::unique_ptr<Link> connect(const std::string& address, const LinkSecurityPtr& security = {}) = 0;
  /// Returns whether links may outlive their connections (core/resumable.h).
  virtual bool is_resumable() const { return false; }
  /// Returns whether the kernel says that nothing listens at an address of this host. Makes a connection, and never
  /// blocks. False if that is not known.
  virtual bool is_refused([[maybe_unused]] const std::string& address,
                          [[maybe_unused]] const LinkSecurityPtr& security = {}) {
    return false;
  }
};

/// Returns the transport of an address "scheme:rest", or null if the scheme is unknown. Transports are stateless
/// singletons.
Transport* find_transport(const std::string& address);

}  // namespace telegrad
