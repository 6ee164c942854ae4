#include "core/faults.h"

#include <algorithm>
#include <chrono>
#include <utility>

#include "core/transport.h"

namespace telegrad {
namespace {

/// SplitMix64: a good hash of one number.
std::uint64_t mix(std::uint64_t x) {
  x += 0x9e3779b97f4a7c15;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  return x ^ (x >> 31);
}

std::uint64_t hash_of(const std::string& text) {
  std::uint64_t hash = 0;
  for (const char c : text) hash = mix(hash ^ static_cast<unsigned char>(c));
  return hash;
}

/// Any destination is any other worker: the connection of a worker to itself has no session, whose end it would notice.
bool is_about(const FaultRule& rule, const FrameHeader& header, const std::string& source,
              const std::string& destination) {
  const bool goes_there = rule.destination.empty() ? destination != source : rule.destination == destination;
  return (rule.types >> static_cast<int>(header.type) & 1) != 0 && (rule.tag < 0 || rule.tag == header.tag) &&
         (header.flags & rule.without) == 0 && goes_there;
}

}  // namespace

void Faults::add(FaultRule rule) {
  std::lock_guard lock(mutex_);
  rules_.push_back({.rule = std::move(rule)});
}

bool Faults::remove(std::uint64_t id) {
  std::lock_guard lock(mutex_);
  return std::erase_if(rules_, [id](const Counted& c) { return c.rule.id == id; }) > 0;
}

void Faults::clear() {
  std::lock_guard lock(mutex_);
  rules_.clear();
}

void Faults::release() {
  std::lock_guard lock(mutex_);
  for (HeldLink* link : links_) link->release();
}

std::vector<AppliedFault> Faults::applied() const {
  std::lock_guard lock(mutex_);
  return applied_;
}

bool Faults::wait(std::size_t count, Nanos timeout) const {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, std::chrono::nanoseconds(timeout), [&] { return applied_.size() >= count; });
}

std::optional<FaultRule> Faults::judge(const FrameHeader& header, const std::string& destination, const Link& link) {
  std::lock_guard lock(mutex_);
  const Counted* found = nullptr;
  for (Counted& c : rules_) {
    if (!is_about(c.rule, header, source_, destination)) continue;
    const std::uint64_t n = ++c.seen;
    if (found || n < c.rule.nth || (c.rule.count > 0 && n - c.rule.nth >= c.rule.count)) continue;
    if (c.rule.probability < 1) {
      const std::uint64_t hash = mix(seed_ ^ mix(c.rule.id ^ mix(n ^ hash_of(source_))));
      if (static_cast<double>(hash >> 11) * 0x1p-53 >= c.rule.probability) continue;
    }
    found = &c;
  }
  if (!found) return std::nullopt;
  applied_.push_back({.rule = found->rule.id,
                      .action = found->rule.action,
                      .destination = destination,
                      .type = header.type,
                      .tag = header.tag,
                      .nth = found->seen,
                      .link = link.describe()});
  changed_.notify_all();
  return found->rule;
}

std::uint64_t Faults::random() {
  std::lock_guard lock(mutex_);
  return mix(seed_ ^ mix(++randoms_));
}

void Faults::add_link(HeldLink* link) {
  std::lock_guard lock(mutex_);
  links_.push_back(link);
}

void Faults::remove_link(HeldLink* link) {
  std::lock_guard lock(mutex_);
  std::erase(links_, link);
}

}  // namespace telegrad
