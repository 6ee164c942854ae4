#include "core/detector.h"

#include <algorithm>
#include <cstdio>

#include "core/engine_parts.h"

namespace telegrad {
namespace {

std::string seconds(Nanos time) {
  char text[32];
  std::snprintf(text, sizeof text, "%.3g s", static_cast<double>(time) / static_cast<double>(kSecond));
  return text;
}

/// Returns a count that grows with anything that arrives.
std::uint64_t life_of(const Connection& c) {
  return c.link->received_bytes() + c.progress.load(std::memory_order_relaxed);
}

}  // namespace

void Detector::add(Connection& c) {
  const bool remote = !c.link->source().empty();
  c.silence = Silence(remote ? parts_.settings.heartbeat : parts_.settings.local_heartbeat);
  observe(c);
}

void Detector::resume(Connection& c) {
  observe(c);
  c.silence.resume(life_of(c));
}

void Detector::observe(Connection& c) {
  const Nanos interval = c.silence.interval();
  if (interval == 0) return;
  c.link->set_silence_limit(Silence::limit(interval));
  next_ = std::min(next_, now() + Silence::pause(interval));
  parts_.timer.arm(next_);
}

Detector::Findings Detector::on_timer(Nanos at) {
  Findings findings;
  if (at >= next_) {
    next_ = kNever;
    const std::uint64_t reads = parts_.leader.reads();
    for (const auto& [token, c] : parts_.peers.connections()) {
      const Nanos interval = c->silence.interval();
      if (interval == 0) continue;
      next_ = std::min(next_, at + Silence::pause(interval));
      if (c->state != Connection::State::kOpen) continue;
      const Silence::Verdict verdict = c->silence.check(at, life_of(*c), reads);
      const bool again = verdict == Silence::Verdict::kPingAgain;
      if ((verdict == Silence::Verdict::kPing || again) && !c->resumption.is_suspended()) {
        findings.silent.push_back(c);
        if (again) findings.overdue.push_back(c);
      }
      if (verdict == Silence::Verdict::kRead) findings.must_read = true;
      if (verdict == Silence::Verdict::kLost) findings.lost.emplace_back(c, at - c->silence.since());
    }
  }
  parts_.timer.arm(next_);
  return findings;
}

Nanos Detector::time_of_loss(Nanos since, Nanos earliest) const {
  const Nanos interval = std::max(parts_.settings.heartbeat, parts_.settings.local_heartbeat);
  return interval == 0 ? kNever : std::max(since + Silence::limit(interval), earliest);
}

void Detector::act(const Findings& findings) {
  for (const ConnectionPtr& c : findings.silent) {
    auto ping = std::make_unique<Outgoing>();
    ping->header.type = FrameType::kPing;
    parts_.sender.transmit(c, std::move(ping));
  }
  for (const ConnectionPtr& c : findings.overdue) parts_.peers.renew(c);
  for (const auto& [c, silence] : findings.lost) {
    const bool remote = !c->link->source().empty();
    const std::string broken = parts_.peers.why_suspended(*c);
    const std::string cause = broken.empty()
                                  ? "): it is stopped or overloaded, or the network between the two has failed"
                                  : "), and could not be reached again after its connection had broken: " + broken;
    parts_.peers.close_connection(c, "it gave no sign of life for " + seconds(silence) + " (option " +
                                         (remote ? "heartbeat: " : "local_heartbeat: ") +
                                         seconds(c->silence.interval()) + cause);
  }
  if (findings.must_read) parts_.leader.interrupt_poll();
}

}  // namespace telegrad
