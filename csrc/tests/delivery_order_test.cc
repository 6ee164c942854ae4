// The order rules: which messages may overtake which.
#include "core/delivery_order.h"

#include <vector>

#include "tests/check.h"

namespace telegrad::test {
namespace {

constexpr FrameType kTypes[] = {
    FrameType::kWelcome, FrameType::kRequest,   FrameType::kReply, FrameType::kOneway, FrameType::kCredit,
    FrameType::kCancel,  FrameType::kCallState, FrameType::kPing,  FrameType::kPong,   FrameType::kGoodbye,
};

FrameHeader header(FrameType type, std::uint64_t call = 0) { return {.type = type, .call_id = call}; }

bool may_overtake(const FrameHeader& later, const std::vector<FrameHeader>& earlier) {
  DeliveryOrder order;
  for (const FrameHeader& h : earlier) order.add(h);
  return order.may_overtake(later);
}

CASE(every_pair_of_types) {
  for (const FrameType later : kTypes) {
    for (const FrameType earlier : kTypes) {
      bool allowed = true;
      for (const FrameType barrier : {FrameType::kGoodbye, FrameType::kWelcome}) {
        allowed = allowed && later != barrier && earlier != barrier;
      }
      if (later == FrameType::kOneway && earlier == FrameType::kOneway) allowed = false;
      if (later == FrameType::kCancel && earlier == FrameType::kRequest) allowed = false;  // of the same call
      CHECK_EQ(may_overtake(header(later, 7), {header(earlier, 7)}), allowed);
    }
    CHECK(may_overtake(header(later), {}));
  }
}

CASE(a_cancel_waits_for_its_own_request_only) {
  const FrameHeader cancel = header(FrameType::kCancel, 7);
  CHECK(may_overtake(cancel, {header(FrameType::kRequest, 6), header(FrameType::kRequest, 8)}));
  CHECK(may_overtake(cancel, {header(FrameType::kReply, 7)}));  // a call of the other end
  CHECK(!may_overtake(cancel, {header(FrameType::kRequest, 6), header(FrameType::kRequest, 7)}));
}

CASE(messages_that_have_been_sent_are_forgotten) {
  for (const FrameType type : kTypes) {
    DeliveryOrder order;
    order.add(header(type, 7));
    order.add(header(type, 7));
    order.remove(header(type, 7));
    const bool is_alone = may_overtake(header(FrameType::kOneway, 7), {header(type, 7)});
    CHECK_EQ(order.may_overtake(header(FrameType::kOneway, 7)), is_alone);
    order.remove(header(type, 7));
    for (const FrameType later : kTypes) CHECK(order.may_overtake(header(later, 7)));
  }
}

}  // namespace
}  // namespace telegrad::test
