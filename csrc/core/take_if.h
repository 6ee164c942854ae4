// Removal of some elements from a queue.
#pragma once

#include <deque>
#include <utility>

#include "base/thread_safety.h"

namespace telegrad {

/// Takes the elements for which `is_taken` returns true, and keeps the order of both parts. Calls it once for each, in
/// order; it may change the element, unlike the predicates of the standard algorithms. The caller holds the locks that
/// it requires.
template <typename T, typename Predicate>
std::deque<T> take_if(std::deque<T>& elements, Predicate is_taken) NO_THREAD_SAFETY_ANALYSIS {
  std::deque<T> taken;
  auto end = elements.begin();  // of those that stay
  for (auto element = elements.begin(); element != elements.end(); ++element) {
    if (is_taken(*element)) {
      taken.push_back(std::move(*element));
      continue;
    }
    if (end != element) *end = std::move(*element);
    ++end;
  }
  elements.erase(end, elements.end());
  return taken;
}

}  // namespace telegrad
