// Which messages of a link have arrived, at either end. Pure: no sockets, no clock, no locks.
//
// The messages of one direction have numbers: the first after the handshake is 0. Numbers are not sent. The first
// connection carries them in ascending order, and each further connection begins with the number that the receiver
// states in its handshake. A message with an earlier number has been delivered and is not sent again.
//
// A large message gets its number before those that overtake it (core/delivery_order.h), so these arrive before an
// earlier number. An acknowledgement names the first number that is missing and the end of those behind it that have
// arrived.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/message.h"
#include "core/resumable.h"

namespace telegrad {

/// Messages of which an earlier one has not arrived; the next message waits beyond this.
inline constexpr std::size_t kMaxNumbers = 1 << 20;
/// Messages and bytes after which a receiver acknowledges. A system call per 128 small messages costs nothing that can
/// be measured, and the sender keeps at most this much while both are idle.
inline constexpr std::uint64_t kMessagesPerAck = 128;
inline constexpr std::uint64_t kBytesPerAck = 256 << 10;

/// The messages that have arrived: all below `count`, and those between `count` and `end`. Message `count` is missing.
struct Acknowledgement {
  std::uint64_t count = 0;
  std::uint64_t end = 0;  // 0: none
};

/// The receiver's part: which messages have arrived.
class Received {
 public:
  /// Records a message. Returns false if it arrived before: it must not be delivered again.
  bool add(std::uint64_t number, std::uint64_t payload);
  /// Returns the number below which all messages have arrived.
  std::uint64_t count() const { return count_; }
  /// Returns whether it is time to acknowledge.
  bool is_ack_due() const { return messages_ >= kMessagesPerAck || bytes_ >= kBytesPerAck; }
  /// Returns what has arrived, which is being acknowledged.
  Acknowledgement acknowledge();

 private:
  std::uint64_t count_ = 0;
  std::map<std::uint64_t, std::uint64_t> beyond_;  // larger numbers that have arrived: first and end of each run
  std::uint64_t messages_ = 0;                     // since the last acknowledgement,
  std::uint64_t bytes_ = 0;                        // and their size; a large message counts as enough
};

/// The sender's part: messages that may have to be sent again.
///
/// Small ones are copied. Of large ones, those whose memory cannot change, or not before their call has ended, are kept
/// by reference. So are those with memory that may change once they are sent, if their owner can tell later whether it
/// has: before they are sent again, they are verified (Resumable::verify). Of the others, and of those that have
/// changed, only the trailer and a reason are kept (core/left_out.h): they fail their own call, and no reference is
/// lost.
class Unacknowledged {
 public:
  /// Returns the number of a message that begins to be sent. It may arrive, and be acknowledged, before `keep`.
  std::uint64_t begin_next();
  /// Keeps a message that has been sent; takes the owner of a large one that does not change or can be verified.
  void keep(std::uint64_t number, Outgoing& message);
  /// Returns whether a message that is being sent has been acknowledged.
  bool has_arrived(std::uint64_t number) const { return number < first_ || messages_[number - first_].arrived; }
  /// Returns the bytes of the copies.
  std::size_t bytes() const { return bytes_; }
  /// Returns whether another message may be sent.
  bool has_room() const { return bytes_ < kMaxUnacknowledged && messages_.size() < kMaxNumbers; }
  /// Records which messages have arrived. Moves their owners to `released`. Returns false if these messages were never
  /// sent.
  bool acknowledge(const Acknowledgement& arrived, Released& released);
  /// Drops the content of a large request whose call has ended; moves its owner to `released`.
  void release(std::uint64_t call, Released& released);
  /// Returns the number of the first message that has not arrived, and of the next one to be sent.
  std::uint64_t begin() const { return first_; }
  std::uint64_t end() const { return first_ + messages_.size(); }
  /// Makes message `number` to be sent again at `at`. One that has arrived meanwhile is replaced by an empty message,
  /// which the receiver drops.
  std::unique_ptr<Outgoing> again(std::uint64_t number, Nanos at, Released& released);

  /// A message with memory that may have changed.
  struct Unverified {
    std::uint64_t number = 0;
    std::shared_ptr<const Outgoing> message;
  };
  /// Begins to verify all that have been sent: the connection has broken.
  void begin_verifying() { verify_end_ = end(); }
  bool has_unverified() const;
  bool is_unverified(std::uint64_t number) const {
    return !has_arrived(number) && messages_[number - first_].check != Check::kNone;
  }
  /// Takes one of these messages, to be copied by the caller. Then its owner is asked.
  std::optional<Unverified> take_unverified();
  /// Records that it has been copied. Returns false if it is not kept any more: its owner need not be asked.
  bool begin_check(const Unverified& taken);
  /// Records the answer of its owner: `copy` is sent again; null if the memory has changed.
  void end_check(const Unverified& taken, std::shared_ptr<Outgoing> copy, Released& released);
  /// Drops the content of all of them that are not being copied. Returns whether any is.
  bool give_up_verifying(Released& released);

 private:
  /// State of such a message.
  enum class Check : std::uint8_t { kNone, kUnverified, kBeingCopied, kAsked };
  struct Kept {
    void copy(const Outgoing& message);
    void copy_without_content(const Outgoing& message);

    std::unique_ptr<std::byte[]> frame;  // a copy, as on the wire
    std::size_t size = 0;
    Nanos deadline = kNever;
    std::shared_ptr<Outgoing> large;  // else the message itself
    Check check = Check::kNone;
    bool arrived = false;
  };
  void drop(std::uint64_t number, Released& released);
  void drop_content(Kept& kept, Released& released);
  Kept* find(const Unverified& taken);

  std::uint64_t first_ = 0;
  std::deque<Kept> messages_;
  std::vector<std::uint64_t> unverified_;  // numbers of those with a check
  std::uint64_t verify_end_ = 0;           // those from this number on were sent after the last break
  std::size_t bytes_ = 0;                  // of the copies
  std::uint64_t arrived_until_ = 0;        // the end of the last acknowledgement
};

/// Copies a message and all of its memory. Returns null if there is no memory for it.
std::shared_ptr<Outgoing> copy_of(const Outgoing& message);

/// Makes a message ready to be sent from its beginning, over another connection.
void rewind(Outgoing& message, Nanos at);

}  // namespace telegrad
