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

enum Kind : char { kHello = 'h', kAnswer = 'a', kConfirm = 'c', kWelcome = 'w', kRefuse = 'r', kMessage = 'm' };

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

  bool dial(int side) {
    End& end = ends[static_cast<std::size_t>(side)];
    if (end.session >= 0 || end.dial >= 0) return false;
    Link link;
    link.initiator = side;
    link.offer = end.agreement.dial();
    link.incarnations[index(side)] = end.incarnation;
    link.incarnations[index(1 - side)] = end.agreement.incarnation();
    link.to[index(1 - side)] += kHello;
    end.dial = static_cast<int>(links.size());
    ++end.dials;
    links.push_back(std::move(link));
    return true;
  }

  bool deliver(int at, int side) {
    Link& link = links[index(at)];
    auto& frames = link.to[index(side)];
    if (frames.empty()) return false;
    const Kind kind = static_cast<Kind>(frames.front());
    frames.erase(0, 1);
    handle(at, side, kind);
    return true;
  }

  /// The end reads the end of a link.
  bool read_end(int at, int side) {
    Link& link = links[index(at)];
    const bool over = link.cut ? link.silent != side : link.closed[index(1 - side)];
    if (link.closed[index(side)] || !over || !link.to[index(side)].empty()) return false;
    close(at, side);
    return true;
  }

  bool cut(int at, int silent) {
    Link& link = links[index(at)];
    if (link.cut || is_over(link)) return false;
    ++cuts;
    link.cut = true;
    link.silent = silent;
    link.to = {};
    return true;
  }

  /// The dial takes too long.
  bool abandon(int side) {
    const int at = ends[index(side)].dial;
    if (at < 0) return false;
    ++cuts;
    close(at, side);
    return true;
  }

  bool end_session(int side) {
    const int at = ends[index(side)].session;
    if (at < 0) return false;
    ++ended;
    close(at, side);
    return true;
  }

  bool send(int side) {
    End& end = ends[index(side)];
    if (end.session < 0) return false;
    ++end.messages;
    Link& link = links[index(end.session)];
    post(link, side, kMessage);
    return true;
  }

  bool restart(int side) {
    End& old = ends[index(side)];
    for (Link& link : links) shut(link, side);
    End end(side);
    end.incarnation = old.incarnation + 1;
    end.dials = old.dials;
    end.restarts = old.restarts + 1;
    old.~End();
    new (&old) End(std::move(end));
    return true;
  }

  /// The membership tells the end of the other's incarnation.
  bool learn(int side) {
    End& end = ends[index(side)];
    if (end.agreement.incarnation() == ends[index(1 - side)].incarnation) return false;
    if (end.agreement.incarnation() != 0) {  // else the dial is to any
      if (end.session >= 0) close(end.session, side);
      if (end.dial >= 0) close(end.dial, side);
    }
    end.agreement.meet(ends[index(1 - side)].incarnation);
    return true;
  }

  // ---- what must hold

  void check() const {
    for (const End& end : ends) {
      CHECK_EQ(end.agreement.is_open(), end.session >= 0);
      CHECK_EQ(end.agreement.has_dial(), end.dial >= 0);
      if (end.session >= 0) CHECK(!links[index(end.session)].closed[index(end.id)]);
    }
    const int a = ends[0].session, b = ends[1].session;
    if (a >= 0 && b >= 0 && a != b) {  // each knows, or will read, that the other has left its link
      CHECK(links[index(a)].closed[1] || links[index(a)].cut);
      CHECK(links[index(b)].closed[0] || links[index(b)].cut);
    }
  }

  /// Lets everything in flight arrive. Then both ends have the same session, or none, or one does not know of a cut.
  void settle() {
    for (bool more = true; more;) {
      more = false;
      for (int at = 0; at < static_cast<int>(links.size()); ++at) {
        for (int side : {0, 1}) more = deliver(at, side) || read_end(at, side) || more;
      }
    }
    check();
    CHECK(ends[0].session == ends[1].session || is_deaf(0) || is_deaf(1));
    for (const End& end : ends) CHECK(end.dial < 0 || links[index(end.dial)].silent == end.id);
    const bool without_fault = cuts == 0 && ended == 0 && ends[0].restarts == 0 && ends[1].restarts == 0;
    if (without_fault) {  // a dial opens a session, and none ends
      CHECK_EQ(lost, 0);
      CHECK(ends[0].session >= 0 || links.empty());
    }
  }
  bool is_deaf(int side) const {
    const int at = ends[index(side)].session;
    return at >= 0 && links[index(at)].silent == side;
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
  static std::size_t index(int n) { return static_cast<std::size_t>(n); }
  static bool is_over(const Link& link) { return link.closed[0] && link.closed[1]; }

  static void post(Link& link, int from, Kind kind) {
    if (!link.cut && !link.closed[index(1 - from)]) link.to[index(1 - from)] += kind;
  }

  static void shut(Link& link, int side) {
    link.closed[index(side)] = true;
    link.to[index(side)].clear();
  }

  void handle(int at, int side, Kind kind) {
    Link& link = links[index(at)];
    End& end = ends[index(side)];
    const auto answer = [&](Kind frame) { post(link, side, frame); };
    const std::uint64_t theirs = link.incarnations[index(1 - side)];
    switch (kind) {
      case kHello: {
        auto& wanted = link.incarnations[index(side)];
        if (wanted != 0 && wanted != end.incarnation) {
          answer(kRefuse);
          return close(at, side);
        }
        wanted = end.incarnation;
        return answer(kAnswer);
      }
      case kAnswer:
        if (!end.agreement.confirm(theirs)) return close(at, side);
        return answer(kConfirm);
      case kConfirm: {
        const OfferVerdict verdict = end.agreement.judge(theirs, link.offer);
        if (verdict.ends_session) {
          const Link& old = links[index(end.session)];
          CHECK(old.cut || old.closed[index(1 - side)]);  // not without need
          close(end.session, side);
        }
        if (verdict.ends_dial) close(end.dial, side);
        if (verdict.answer != OfferAnswer::kAccept) {
          answer(kRefuse);
          return close(at, side);
        }
        end.agreement.accept(theirs, link.offer);
        open(at, side);
        return answer(kWelcome);
      }
      case kWelcome:
        CHECK_EQ(end.dial, at);
        end.agreement.open_dial();
        end.dial = -1;
        return open(at, side);
      case kRefuse:
        return close(at, side);
      case kMessage:
        return CHECK_EQ(end.session, at);
    }
  }

  void open(int at, int side) {
    Link& link = links[index(at)];
    CHECK(!link.opened[index(side)]);
    CHECK_EQ(ends[index(side)].session, -1);
    link.opened[index(side)] = true;
    ends[index(side)].session = at;
  }

  void close(int at, int side) {
    End& end = ends[index(side)];
    shut(links[index(at)], side);
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
    for (int side : {0, 1}) {  // an end without a session can still open one
      World again = end;
      again.learn(side);
      if (again.ends[static_cast<std::size_t>(1 - side)].agreement.has_confirmed()) again.abandon(1 - side);  // in time
      if (!again.dial(side)) continue;
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
    for (int side : {0, 1}) {
      const End& end = world.ends[static_cast<std::size_t>(side)];
      attempt(end.dials < limits.dials, [&](World& w) { return w.dial(side); });
      attempt(end.messages < limits.messages, [&](World& w) { return w.send(side); });
      attempt(end.restarts < limits.restarts, [&](World& w) { return w.restart(side); });
      attempt(world.ended < limits.ends, [&](World& w) { return w.end_session(side); });
      attempt(world.cuts < limits.cuts, [&](World& w) { return w.abandon(side); });
      attempt(limits.restarts > 0, [&](World& w) { return w.learn(side); });
      for (int at = 0; at < static_cast<int>(world.links.size()); ++at) {
        attempt(true, [&](World& w) { return w.deliver(at, side); });
        attempt(true, [&](World& w) { return w.read_end(at, side); });
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

CASE(a_session_is_ended_and_dialed_again) {
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
  CHECK(!agreement.confirm(7));
  CHECK(agreement.confirm(8));
}

}  // namespace
}  // namespace telegrad::test
