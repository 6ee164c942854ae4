// Faults for tests: rules that drop, delay, repeat, reorder or corrupt messages, or cut their connection.
//
// An engine with `Settings::faults` wraps each of its links (`add_faults`, in transports/faulty). The link asks the
// rules about each message that it sends. An engine without them has no such link, and pays nothing.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <vector>

#include "base/clock.h"
#include "core/message.h"

namespace telegrad {

class Link;

enum class FaultAction : std::uint8_t {
  kDrop = 0,   // lose the message, then close the link: a transport never loses one alone
  kDelay,      // hold the message and all behind it
  kDuplicate,  // send the message twice
  kReorder,    // send the message after the next one
  kCut,        // close the link before the message
  kCorrupt,    // flip a bit of the message on its way
};

struct FaultRule {
  std::uint64_t id = 0;
  FaultAction action = FaultAction::kDrop;
  std::string destination;    // name of the peer; "": any but the worker itself
  std::uint32_t types = 0;    // bit n: messages of the FrameType n
  int tag = -1;               // -1: any
  std::uint16_t without = 0;  // only messages without these flags
  std::uint64_t nth = 1;      // of these messages, the first that the rule applies to,
  std::uint64_t count = 1;    // and how many; 0: all that follow
  double probability = 1;     // that it applies to one of them
  Nanos delay = 0;            // of kDelay; 0: until `release`
  bool body = false;          // of kCorrupt: a bit of the body, else of the header
};

/// A rule applied to a message.
struct AppliedFault {
  std::uint64_t rule = 0;
  FaultAction action{};
  std::string destination;
  FrameType type{};
  std::uint8_t tag = 0;
  std::uint64_t nth = 0;  // number of the message among those that the rule is about
  std::string link;       // see Link::describe
};

/// A link that holds messages back until they are released.
class HeldLink {
 public:
  virtual ~HeldLink() = default;
  /// Sends what the link holds back. Any thread; never blocks.
  virtual void release() = 0;
};

/// The rules of one worker, and what they have done. Any thread may call any method; only `wait` blocks.
class Faults {
 public:
  /// `source`: name of the worker. Equal seeds, rules and messages give equal faults.
  Faults(std::string source, std::uint64_t seed) : source_(std::move(source)), seed_(seed) {}

  const std::string& source() const { return source_; }

  void add(FaultRule rule);
  /// Returns false if there is no rule of this id.
  bool remove(std::uint64_t id);
  void clear();
  /// Releases the messages that rules hold back now.
  void release();

  std::vector<AppliedFault> applied() const;
  /// Waits until at least `count` faults have been applied. Returns false if `timeout` has passed.
  bool wait(std::size_t count, Nanos timeout) const;

  /// Counts a message to `destination` at each rule about it, and returns the first rule that applies.
  std::optional<FaultRule> judge(const FrameHeader& header, const std::string& destination, const Link& link);
  /// Returns the next number of a sequence that depends on the seed only.
  std::uint64_t random();

  void add_link(HeldLink* link);
  void remove_link(HeldLink* link);

 private:
  struct Counted {
    FaultRule rule;
    std::uint64_t seen = 0;
  };

  const std::string source_;
  const std::uint64_t seed_;
  mutable std::mutex mutex_;
  mutable std::condition_variable changed_;
  std::vector<Counted> rules_;
  std::vector<AppliedFault> applied_;
  std::vector<HeldLink*> links_;
  std::uint64_t randoms_ = 0;
};

using FaultsPtr = std::shared_ptr<Faults>;

/// Wraps a link so that rules apply to what it sends. Implemented in transports/faulty.
std::unique_ptr<Link> add_faults(std::unique_ptr<Link> link, FaultsPtr faults);

}  // namespace telegrad
