// Order of delivery: the one place that says which messages may overtake which.
//
// A link may send a large message in parts (Link::is_large) and other messages between them, which then arrive first.
// Everything else arrives in the order in which it was sent. A later message may overtake the large one, except:
//
//     later message      must not overtake                    because
//     large message      any large message                    the link sends one at a time
//     kCancel            the kRequest with its call_id        it would find nothing to cancel
//     kOneway            a kOneway                            its receivers process these in order
//     kGoodbye           anything                             it ends the stream
//     anything           a kGoodbye, a handshake frame
//     handshake frame    anything
//
// No other order is needed: replies are matched by call_id, threads process requests in any order, credits add up, and
// the protocols of references, streams, autograd contexts and backward passes assume no order between requests, replies
// and one-way messages. A large message carries neither credit nor a name that other messages rely on (Sender).
//
// The sender applies the rules to its queue, the receiver to messages that have not arrived completely.
#pragma once

#include <cstddef>
#include <cstdint>
#include <unordered_map>

#include "core/message.h"

namespace telegrad {

/// Messages that have been sent, or queued, and not delivered.
class DeliveryOrder {
 public:
  void add(const FrameHeader& message) { count(message, 1); }
  void remove(const FrameHeader& message) { count(message, -1); }

  /// Returns whether a later message that is not large may overtake all of them.
  bool may_overtake(const FrameHeader& later) const {
    if (barriers_ > 0) return false;
    switch (later.type) {
      case FrameType::kCancel:
        return !requests_.contains(later.call_id);
      case FrameType::kOneway:
        return oneways_ == 0;
      default:
        return messages_ == 0 || !is_barrier(later.type);
    }
  }

 private:
  static bool is_barrier(FrameType type) { return type == FrameType::kGoodbye || is_handshake(type); }

  void count(const FrameHeader& message, int change) {
    messages_ += change;
    if (is_barrier(message.type)) barriers_ += change;
    if (message.type == FrameType::kOneway) oneways_ += change;
    if (message.type != FrameType::kRequest) return;
    const auto found = requests_.try_emplace(message.call_id).first;
    if ((found->second += change) == 0) requests_.erase(found);
  }

  std::int64_t messages_ = 0, barriers_ = 0, oneways_ = 0;
  std::unordered_map<std::uint64_t, int> requests_;  // by call_id
};

}  // namespace telegrad
