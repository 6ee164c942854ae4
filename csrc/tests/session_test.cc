// Every order in which two workers dial, accept, break, abandon, end and restart, up to a number of each: they never
// have two sessions, a message arrives in its session only, and they agree once nothing is in flight.
#include "core/session.h"

#include <algorithm>
#include <array>
#include <string>
#include <tuple>
#include <unordered_set>
#include <vector>

#include "tests/check.h"

namespace telegrad::test {
namespace {

enum Kind : char { kHello = 'h', kChallenge = 'c', kProof = 'p', kWelcome = 'w', kRefuse = 'r', kMessage = 'm' };

struct Link {
  int initiator = 0;
  SessionOffer offer;
  std::array<std::uint64_t, 2> incarnations{};  // of the ends; the acceptor's is what the initiator expects; 0: any
  std::array<std::string, 2> to;                // frames on their way to an end, by kind
  std::array<bool, 2> closed{};
  std::array<bool, 2> opened{};
  bool cut = false;
  int silent = -1;  // this end does not read that the link was cut
};

struct Limits {
  int dials, cuts, restarts, ends, messages;
};

struct End {
  explicit End(int id) : id(id), agreement(id == 0) {}
  int id;
  std::uint64_t incarnation = 1;
  SessionAgreement agreement;
  int dial = -1;     // link of the dial
  int session = -1;  // link of the session
  int dials = 0, restarts = 0, messages = 0;
};

class World {
 public:
  std::array<End, 2> ends{End(0), End(1)};
  std::vector<Link> links;
  int cuts = 0, ended = 0;
  int lost = 0;  // sessions that an end has left

  // ---- what may happen; each returns false if it cannot

  bool dial(int who) {
    End& end = ends[static_cast<std::size_t>(who)];
    if (end.session >= 0 || end.dial >= 0) return false;
    Link link;
    link.initiator = who;
    link.offer = end.agreement.dial();
    link.incarnations[side(who)] = end.incarnation;
    link.incarnations[side(1 - who)] = end.agreement.incarnation();
    link.to[side(1 - who)] += kHello;
    end.dial = static_cast<int>(links.size());
    ++end.dials;
    links.push_back(std::move(link));
    return true;
  }

  bool deliver(int at, int who) {
    Link& link = links[side(at)];
    auto& frames = link.to[side(who)];
    if (frames.empty()) return false;
    const Kind kind = static_cast<Kind>(frames.front());
    frames.erase(0, 1);
    handle(at, who, kind);
    return true;
  }

  /// The end reads the end of a link.
  bool read_end(int at, int who) {
    Link& link = links[side(at)];
    const bool over = link.cut ? link.silent != who : link.closed[side(1 - who)];
    if (link.closed[side(who)] || !over || !link.to[side(who)].empty()) return false;
    close(at, who);
    return true;
  }

  bool cut(int at, int silent) {
    Link& link = links[side(at)];
    if (link.cut || is_over(link)) return false;
    ++cuts;
    link.cut = true;
    link.silent = silent;
    link.to = {};
    return true;
  }

  /// The dial takes too long.
  bool abandon(int who) {
    const int at = ends[side(who)].dial;
    if (at < 0) return false;
    ++cuts;
    close(at, who);
    return true;
  }

  bool end_session(int who) {
    const int at = ends[side(who)].session;
    if (at < 0) return false;
    ++ended;
    close(at, who);
    return true;
  }

  bool send(int who) {
    End& end = ends[side(who)];
    if (end.session < 0) return false;
    ++end.messages;
    Link& link = links[side(end.session)];
    post(link, who, kMessage);
    return true;
  }

  bool restart(int who) {
    End& old = ends[side(who)];
    for (Link& link : links) shut(link, who);
    End end(who);
    end.incarnation = old.incarnation + 1;
    end.dials = old.dials;
    end.restarts = old.restarts + 1;
    old.~End();
    new (&old) End(std::move(end));
    return true;
  }

  /// The membership tells the end of the other's incarnation.
  bool learn(int who) {
    End& end = ends[side(who)];
    if (end.agreement.incarnation() == ends[side(1 - who)].incarnation) return false;
    if (end.agreement.incarnation() != 0) {  // else the dial is to any
      if (end.session >= 0) close(end.session, who);
      if (end.dial >= 0) close(end.dial, who);
    }
    end.agreement.meet(ends[side(1 - who)].incarnation);
    return true;
  }

  // ---- what must hold

  void check() const {
    for (const End& end : ends) {
      CHECK_EQ(end.agreement.is_open(), end.session >= 0);
      CHECK_EQ(end.agreement.has_dial(), end.dial >= 0);
      if (end.session >= 0) CHECK(!links[side(end.session)].closed[side(end.id)]);
    }
    const int a = ends[0].session, b = ends[1].session;
    if (a >= 0 && b >= 0 && a != b) {  // each knows, or will read, that the other has left its link
      CHECK(links[side(a)].closed[1] || links[side(a)].cut);
      CHECK(links[side(b)].closed[0] || links[side(b)].cut);
    }
  }

  /// Lets everything in flight arrive. Then both ends have the same session, or none, or one does not know of a cut.
  void settle() {
    for (bool more = true; more;) {
      more = false;
      for (int at = 0; at < static_cast<int>(links.size()); ++at) {
        for (int who : {0, 1}) more = deliver(at, who) || read_end(at, who) || more;
      }
    }
    check();
    CHECK(ends[0].session == ends[1].session || is_deaf(0) || is_deaf(1));
    for (const End& end : ends) CHECK(end.dial < 0 || links[side(end.dial)].silent == end.id);
    const bool without_fault = cuts == 0 && ended == 0 && ends[0].restarts == 0 && ends[1].restarts == 0;
    if (without_fault) {  // a dial opens a session, and none ends
      CHECK_EQ(lost, 0);
      CHECK(ends[0].session >= 0 || links.empty());
    }
  }
  bool is_deaf(int who) const {
    const int at = ends[side(who)].session;
    return at >= 0 && links[side(at)].silent == who;
  }

  /// Names the state. Links that both ends have closed play no part any more.
  std::string key() const {
    std::string out;
    const auto add = [&](auto value) { out += static_cast<char>(value); };
    const auto rank = [&](int at) {
      return at < 0 ? -1 : std::count_if(links.begin(), links.begin() + at, [](const Link& l) { return !is_over(l); });
    };
    for (const End& end : ends) {
      std::apply([&](auto... n) { (add(n), ...); }, end.agreement.state());
      add(end.incarnation);
      add(end.messages);
      for (int at : {end.dial, end.session}) add(rank(at));
    }
    for (const Link& link : links) {
      if (is_over(link)) continue;
      for (auto n : {link.offer.number, link.offer.previous.number, link.incarnations[0], link.incarnations[1]}) add(n);
      add(link.initiator | link.offer.previous.mine << 1 | link.cut << 2 | link.closed[0] << 3 | link.closed[1] << 4 |
          link.opened[0] << 5 | link.opened[1] << 6);
      add(link.silent);
      for (const std::string& frames : link.to) out += frames + '.';
    }
    add(cuts);
    add(ended);
    return out;
  }

 private:
  static std::size_t side(int n) { return static_cast<std::size_t>(n); }
  static bool is_over(const Link& link) { return link.closed[0] && link.closed[1]; }

  static void post(Link& link, int from, Kind kind) {
    if (!link.cut && !link.closed[side(1 - from)]) link.to[side(1 - from)] += kind;
  }

  static void shut(Link& link, int who) {
    link.closed[side(who)] = true;
    link.to[side(who)].clear();
  }

  void handle(int at, int who, Kind kind) {
    Link& link = links[side(at)];
    End& end = ends[side(who)];
    const auto answer = [&](Kind frame) { post(link, who, frame); };
    const std::uint64_t theirs = link.incarnations[side(1 - who)];
    switch (kind) {
      case kHello: {
        auto& wanted = link.incarnations[side(who)];
        if (wanted != 0 && wanted != end.incarnation) {
          answer(kRefuse);
          return close(at, who);
        }
        wanted = end.incarnation;
        return answer(kChallenge);
      }
      case kChallenge:
        if (!end.agreement.prove(theirs)) return close(at, who);
        return answer(kProof);
      case kProof: {
        const OfferVerdict verdict = end.agreement.judge(theirs, link.offer);
        if (verdict.ends_session) {
          const Link& old = links[side(end.session)];
          CHECK(old.cut || old.closed[side(1 - who)]);  // not without need
          close(end.session, who);
        }
        if (verdict.ends_dial) close(end.dial, who);
        if (verdict.answer != OfferAnswer::kAccept) {
          answer(kRefuse);
          return close(at, who);
        }
        end.agreement.accept(theirs, link.offer);
        open(at, who);
        return answer(kWelcome);
      }
      case kWelcome:
        CHECK_EQ(end.dial, at);
        end.agreement.open_dial();
        end.dial = -1;
        return open(at, who);
      case kRefuse:
        return close(at, who);
      case kMessage:
        return CHECK_EQ(end.session, at);
    }
  }

  void open(int at, int who) {
    Link& link = links[side(at)];
    CHECK(!link.opened[side(who)]);
    CHECK_EQ(ends[side(who)].session, -1);
    link.opened[side(who)] = true;
    ends[side(who)].session = at;
  }

  void close(int at, int who) {
    End& end = ends[side(who)];
    shut(links[side(at)], who);
    if (end.dial == at) {
      end.agreement.give_up();
      end.dial = -1;
    }
    if (end.session == at) {
      end.agreement.end();
      end.session = -1;
      ++lost;
    }
  }
};

/// Runs every order of the actions; returns the number of states.
std::size_t explore(const Limits& limits) {
  std::unordered_set<std::string> seen;
  std::vector<World> left{World()};
  const auto visit = [&](World&& next) {
    next.check();
    if (!seen.insert(next.key()).second) return;
    World end = next;
    end.settle();
    for (int who : {0, 1}) {  // an end without a session can still open one
      World again = end;
      again.learn(who);
      if (again.ends[static_cast<std::size_t>(1 - who)].agreement.has_proven()) again.abandon(1 - who);  // in time
      if (!again.dial(who)) continue;
      again.settle();
      CHECK(again.ends[0].session >= 0);
      CHECK_EQ(again.ends[0].session, again.ends[1].session);
    }
    left.push_back(std::move(next));
  };
  while (!left.empty()) {
    const World world = std::move(left.back());
    left.pop_back();
    const auto attempt = [&](bool allowed, auto act) {
      if (!allowed) return;
      World next = world;
      if (act(next)) visit(std::move(next));
    };
    for (int who : {0, 1}) {
      const End& end = world.ends[static_cast<std::size_t>(who)];
      attempt(end.dials < limits.dials, [&](World& w) { return w.dial(who); });
      attempt(end.messages < limits.messages, [&](World& w) { return w.send(who); });
      attempt(end.restarts < limits.restarts, [&](World& w) { return w.restart(who); });
      attempt(world.ended < limits.ends, [&](World& w) { return w.end_session(who); });
      attempt(world.cuts < limits.cuts, [&](World& w) { return w.abandon(who); });
      attempt(limits.restarts > 0, [&](World& w) { return w.learn(who); });
      for (int at = 0; at < static_cast<int>(world.links.size()); ++at) {
        attempt(true, [&](World& w) { return w.deliver(at, who); });
        attempt(true, [&](World& w) { return w.read_end(at, who); });
      }
    }
    for (int at = 0; at < static_cast<int>(world.links.size()); ++at) {
      for (int silent : {-1, 0, 1}) attempt(world.cuts < limits.cuts, [&](World& w) { return w.cut(at, silent); });
    }
  }
  return seen.size();
}

CASE(both_dial_at_once) { CHECK(explore({.dials = 1, .cuts = 0, .restarts = 0, .ends = 0, .messages = 2}) > 100); }

CASE(links_break_at_any_moment) {
  CHECK(explore({.dials = 2, .cuts = 1, .restarts = 0, .ends = 0, .messages = 1}) > 1000);
}

CASE(a_session_is_ended_and_dialed_anew) {
  CHECK(explore({.dials = 2, .cuts = 0, .restarts = 0, .ends = 2, .messages = 0}) > 1000);
}

CASE(workers_restart) { CHECK(explore({.dials = 2, .cuts = 0, .restarts = 1, .ends = 0, .messages = 0}) > 1000); }

SLOW_CASE(all_at_once) { CHECK(explore({.dials = 2, .cuts = 1, .restarts = 1, .ends = 1, .messages = 1}) > 100'000); }

/// A worker that was replaced while it was stopped.
CASE(an_older_incarnation_is_stale) {
  SessionAgreement agreement(true);
  const SessionOffer offer{.number = 1, .previous = {}};
  CHECK(agreement.judge(7, offer).answer == OfferAnswer::kAccept);
  agreement.accept(7, offer);
  const OfferVerdict verdict = agreement.judge(8, offer);
  CHECK(verdict.answer == OfferAnswer::kAccept && verdict.ends_session);
  agreement.end();
  agreement.accept(8, offer);
  CHECK(agreement.judge(7, {.number = 2, .previous = {}}).answer == OfferAnswer::kStale);
  agreement.end();
  agreement.dial();
  CHECK(agreement.judge(9, offer).ends_dial);  // the older one must not accept it
  CHECK(!agreement.prove(7));
  CHECK(agreement.prove(8));
}

}  // namespace
}  // namespace telegrad::test
