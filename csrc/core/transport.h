// The transport contract. Whoever adds a transport implements these three classes, gives it a scheme in
// transports/registry.cc, and adds that scheme to the list in csrc/tests/transport_test.cc, where the conformance suite
// holds it to every sentence below.
//
// A link moves whole messages between two ends, in order, each exactly once, until it breaks. It knows nothing of
// calls, peers or Python: there is no pointer upward. Three verbs end a thing:
//     close()      never blocks, may be called from any thread and more than once; the other end sees the end
//     destructor   frees; called when no other thread is inside the object
// (Stopping, which waits, is the engine's business: it closes links and waits for its threads.)
//
// Memory. A link sends straight from the memory an Outgoing names and holds no pointer to it after kSent. It fills
// blocks it got from `Inbox::allocate`.
//
// A link that shares memory with its peer may lend some to its sender (`Link::lend`). A segment that names its lease
// (OutSegment::lease), and lies in that memory, is not copied: the link sends where it lies (SegmentHeader::lease), and
// the receiver maps the region and delivers it as a block of its own, to read and to write. So the sender gives it up:
// nobody reads or writes it through the sender's block any more, which is to be destroyed once the message has left. It
// can be given once; what cannot be given is copied. The receiver's block gives the region back when it is destroyed,
// on whatever thread that happens. When nobody holds it, the region can be lent again. Blocks stay readable when the
// link is closed and gone. What is lent is bounded: where regions do not come back, `lend` gives nothing, and the
// sender sends bytes; it never waits for them.
//
// A received block may name a lease too (Block::lease): under it what it holds goes back over the link as it is, with a
// message that alone has it. The peer gets its own memory back as a block.
//
// What goes to several peers lies in memory once (OutSegment::common, transports/commons.h). A link that can hands its
// peer that memory in place of the bytes; the receiver's block is the receiver's own to write all the same. Any other
// link sends the bytes.
//
// A process that forks finds what it has been lent, or has received, in both processes, each its own.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "core/clock.h"
#include "core/message.h"

namespace telegrad {

/// Where a link puts what it reads. Called only from inside `Link::receive`, on the calling thread.
class Inbox {
 public:
  virtual ~Inbox() = default;
  /// Memory for `size` bytes. May throw std::bad_alloc: the link then discards the content of a request or reply that
  /// may be discarded (core/left_out.h), and fails with that reason at any other message.
  virtual BlockPtr allocate(std::size_t size) = 0;
  /// Memory that the peer has lent, in place of such: the block to deliver for it. May throw std::bad_alloc.
  virtual BlockPtr take_over(BlockPtr lent) { return lent; }
  /// One whole message. Ownership passes to the inbox.
  virtual void deliver(Incoming&& message) = 0;
};

enum class SendState {
  kSent,     // the whole message has left; its memory may change now
  kBlocked,  // the peer must take something first, or a good part has left and it is others' turn: call again with the
             // same message when the link is writable
  kBroken,   // the link has failed. `receive` still delivers what had arrived before it says so too: leave it the last
             // word
};

enum class ReceiveState {
  kIdle,    // nothing more to read for now
  kMore,    // the budget is used up, there may be more
  kToSend,  // nothing more to read for now, and what has been read lets the sending side go on: `release`, and `send`
            // what was blocked
  kBroken,  // the link has failed or the other end is gone; `error()` says why
};

/// The user of the process at the other end of a link.
struct PeerUser {
  enum class Kind {
    kRemote,   // the process is not on this host, or in another network namespace of it
    kUser,     // it is on this host, and `uid` is its user
    kUnknown,  // it may be on this host, and the kernel does not tell the user
  };
  Kind kind;
  uid_t uid = 0;
  std::string why = {};  // kUnknown: the reason; "" when the process has closed its end
};
class UserLookup;

/// Memory that a link lends its sender.
struct Lent {
  std::uint64_t lease;  // not 0, and the link's own; OutSegment::lease names it
  BlockPtr memory;      // to be written before the message that names it is sent, and not after; 64-byte aligned
};

class Link {
 public:
  virtual ~Link() = default;

  /// A descriptor that polls readable when `receive` has something to do, and writable (only asked for after
  /// kBlocked, or while connecting) when `send` has. Constant for the life of the link.
  virtual int fd() const = 0;

  /// Moves as much of `message` as goes without blocking, straight from its memory. One thread at a time (the
  /// caller serializes); may run at the same time as `receive`. After kBlocked the next send must be of the same
  /// message. Never throws.
  virtual SendState send(Outgoing& message) = 0;

  /// Takes a copy of a small message, to leave with what follows it: with the next `send`, or by `release`. False: not
  /// taken (it is too large, or enough is held already), and to be sent. As `send`, one thread at a time. Never throws.
  virtual bool hold([[maybe_unused]] const Outgoing& message) { return false; }

  /// Sends what is held. kBlocked: as after `send`, call again when the link is writable.
  virtual SendState release() { return SendState::kSent; }

  /// Memory of the link's own for `size` bytes, or nothing: most links have none, and what they have may be lent out,
  /// or not be there yet because nobody has asked for so much before. Any thread; never blocks, never throws.
  virtual std::optional<Lent> lend([[maybe_unused]] std::size_t size) { return std::nullopt; }

  /// Something is about to be sent to several peers (OutSegment::common): a link that can hand over the memory it lies
  /// in tells its peer of that. True: the peer knows it. Any thread; never blocks, never throws.
  virtual bool prepare([[maybe_unused]] const Common& piece) { return false; }

  /// Bytes of memory that the link keeps for lending.
  virtual std::size_t lendable() const { return 0; }

  /// Gives up what of it has not been used since `before`. Any thread; never blocks.
  virtual void trim([[maybe_unused]] Nanos before) {}

  /// Reads what is there without blocking, about `budget` bytes at most, into memory from `inbox`. One thread at a
  /// time. A frame beyond the limits, or one that is not a frame, breaks the link before anything is allocated for
  /// it. A request or reply for which there is no memory is delivered without its content (Incoming::discarded), and
  /// leases in it are given back; the link goes on. Never throws.
  virtual ReceiveState receive(Inbox& inbox, std::size_t budget) = 0;

  /// A link whose messages come through memory can be looked into without a system call. From now on the receiving side
  /// does so, with `ready`, and `fd` need not tell of messages; of all else it does, the end above all. False: this
  /// link knows only its `fd`. Called by who receives, as the two below.
  virtual bool stay_awake() { return false; }

  /// While awake: has `receive` something to do that `fd` need not tell of? No system call.
  virtual bool ready() { return true; }

  /// From now on `fd` tells of everything again, as it does at first. False: there is a message now, and the link stays
  /// awake.
  virtual bool fall_asleep() { return true; }

  /// Lanes: more connections to the same end, over which a link may spread large messages. Does it want some now? The
  /// engine asks, once in a while, at the end that has connected; it makes them as it makes links, handshake and all,
  /// so that a lane is from whom it says it is, and gives them to the links at both ends. Called by who receives, as
  /// the next three.
  virtual bool wants_lanes() const { return false; }

  /// Takes a link to the same end, of the same transport, which nobody else uses from now on. A lane that breaks breaks
  /// the link. False: it is not taken, for the link is closed, or has no use for it.
  virtual bool add_lane([[maybe_unused]] std::shared_ptr<Link> lane) { return false; }

  /// How many it has.
  virtual std::size_t lanes() const { return 0; }

  /// One more descriptor, from the first lane on: it polls readable when `receive` has something to do that `fd` does
  /// not tell of, or `send` after kBlocked. -1: there is none. Who finds it readable calls `look_at_lanes` first.
  virtual int lanes_fd() const { return -1; }
  virtual void look_at_lanes() {}

  /// After kBlocked: does `fd` tell when to send on? Else `lanes_fd` does, or `receive` (kToSend).
  virtual bool waits_for_fd() const { return true; }

  /// Every descriptor of the link, for a forked child to close.
  virtual std::vector<int> descriptors() const { return {fd()}; }

  /// What a frame may be from now on. Called from inside `Inbox::deliver` or before the first `receive`.
  virtual void set_limits(const Limits& limits) = 0;

  /// Ends the link in both directions. What `send` reported as kSent is still delivered to an end that reads.
  virtual void close() = 0;

  /// Why the link broke; "" for a plain end of stream. Meaningful after kBroken.
  virtual std::string error() const = 0;

  /// The user at the other end. Asked for before anything else of the link; takes a few system calls, and no descriptor
  /// but those of `lookup`.
  virtual PeerUser peer_user(UserLookup& lookup) const = 0;

  /// The machine at the other end, for limits per machine: an IPv4 address, or a network of IPv6. "": this one.
  virtual std::string source() const { return {}; }

  /// "unix", "tcp 10.0.0.1:5000 -> 10.0.0.2:6000", for logs and errors.
  virtual std::string describe() const = 0;
};

class Listener {
 public:
  virtual ~Listener() = default;
  virtual int fd() const = 0;                  // readable when `accept` has something
  virtual std::unique_ptr<Link> accept() = 0;  // never blocks; null when there is nothing; never throws
  virtual std::string address() const = 0;     // what a peer passes to `connect`, scheme included
};

class Transport {
 public:
  virtual ~Transport() = default;
  /// Throws std::system_error naming the address. Never blocks.
  virtual std::unique_ptr<Listener> listen(const std::string& address) = 0;
  /// Starts connecting, never blocks: the link may still be connecting when it is returned (then it polls writable
  /// when done, and `send` says kBlocked or kBroken till then). Throws std::system_error if it fails at once;
  /// EAGAIN means "busy, try again".
  virtual std::unique_ptr<Link> connect(const std::string& address) = 0;
};

/// The transport of an address "scheme:rest", or null when there is none of that name. Transports are stateless
/// singletons.
Transport* find_transport(const std::string& address);

}  // namespace telegrad
