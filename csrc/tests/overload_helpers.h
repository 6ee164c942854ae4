// Helpers of the tests of limits.
#pragma once

#include <algorithm>
#include <string>

#include "tests/workers.h"

namespace telegrad::test {

inline constexpr std::int64_t kHardRequests = 1024;  // see core/overload.cc
inline constexpr std::size_t kLarge = 600 << 10;

inline Settings with_depth(std::uint32_t depth) {
  Settings s;
  s.load.call_depth = depth;
  return s;
}

inline Settings with_requests(std::uint32_t requests) {
  Settings s;
  s.handshake.limits.requests = requests;
  return s;
}

inline Settings with_load(const LoadLimits& load) {
  Settings s;
  s.load = load;
  return s;
}

inline LimitSnapshot limit(Worker& w, const std::string& option) {
  const Snapshot s = w.engine->snapshot([](std::uint64_t, const KeepAlive&) {});
  const auto found = std::ranges::find(s.limits, option, &LimitSnapshot::option);
  CHECK(found != s.limits.end());
  return *found;
}

inline void check_overloaded(const Completion& o, const std::string& option) {
  CHECK(o.status == CallStatus::kOverloaded);
  CHECK(o.why.starts_with(option + ": "));
}

}  // namespace telegrad::test
