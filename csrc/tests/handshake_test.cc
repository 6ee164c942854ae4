// The handshake: accepted peers, and every way to be rejected.
#include "core/handshake.h"

#include <deque>
#include <utility>
#include <vector>

#include "base/crypto.h"
#include "tests/workers.h"

namespace telegrad::test {
namespace {

const Identity kAlice{.id = 1, .name = "alice", .incarnation = 11};
const Identity kBob{.id = 2, .name = "bob", .incarnation = 22};

HandshakeConfig config(const Identity& me, std::string secret = "secret", std::string group = "group") {
  return {.me = me, .group = std::move(group), .secret = std::move(secret)};
}

struct Frame {
  FrameType type;
  std::string body;
};

Frame frame_of(const Handshake::Step& step) {
  CHECK(step.send.has_value());
  return {*step.send, step.body};
}

void check_failed(const Handshake::Step& step, const std::string& why) {
  CHECK(!step.open);
  CHECK_SAYS(step.failed, why);
}

/// Alice and Bob; the test passes each frame between them.
struct Talk {
  explicit Talk(HandshakeConfig a = config(kAlice), HandshakeConfig b = config(kBob), Identity target = kBob,
                const SessionOffer& offer = {})
      : alice_credo(std::move(a)),
        bob_credo(std::move(b)),
        alice(Handshake::initiate(alice_credo, target, offer)),
        bob(Handshake::accept(bob_credo)) {}

  HandshakeConfig alice_credo, bob_credo;
  Handshake alice, bob;
};

/// The frames of a whole handshake, with the two ends as they were before each.
struct Recording {
  explicit Recording(Talk& t) {
    Frame next = frame_of(t.alice.begin());
    hello = keep(t, next);
    challenge = keep(t, next = frame_of(advance(t.bob, next.type, next.body)));
    proof = keep(t, next = frame_of(advance(t.alice, next.type, next.body)));
    answer = keep(t, next = frame_of(advance(t.bob, next.type, next.body)));
    confirm = keep(t, next = frame_of(advance(t.alice, next.type, next.body)));
  }
  Frame keep(const Talk& t, const Frame& frame) {
    before.push_back(t);
    return frame;
  }
  Frame hello, challenge, proof, answer, confirm;
  std::vector<Talk> before;  // the receiver of each frame has not got it yet
};

/// Runs the handshake to its end and returns the last step of both ends.
std::pair<std::string, std::string> run(Talk& t) {
  std::string alice_came_to, bob_came_to;
  std::deque<std::pair<bool, Frame>> flying{{true, frame_of(t.alice.begin())}};  // true: to Bob
  while (!flying.empty()) {
    auto [to_bob, f] = std::move(flying.front());
    flying.pop_front();
    std::string& came_to = to_bob ? bob_came_to : alice_came_to;
    if (!came_to.empty() && came_to != "open") continue;
    const Handshake::Step step = advance(to_bob ? t.bob : t.alice, f.type, f.body);
    if (step.send) flying.emplace_back(!to_bob, frame_of(step));
    if (step.open) came_to = "open";
    if (!step.failed.empty()) came_to = step.failed;
  }
  return {alice_came_to, bob_came_to};
}

CASE(members_authenticate_each_other) {
  Talk t(config(kAlice), config(kBob), {.id = 2, .name = "bob", .incarnation = 0});  // any incarnation will do
  CHECK(run(t) == std::pair<std::string, std::string>("open", "open"));
  CHECK_EQ(t.alice.peer().id, 2);
  CHECK_EQ(t.alice.peer().name, "bob");
  CHECK_EQ(t.alice.peer().incarnation, 22u);
  CHECK_EQ(t.bob.peer().id, 1);
  CHECK_EQ(t.bob.peer().name, "alice");
  CHECK_EQ(t.bob.peer().incarnation, 11u);
}

/// Both ends compute the same name of their link, and no other link has it.
CASE(links_have_names_for_their_lanes) {
  HandshakeConfig alice_credo = config(kAlice), bob_credo = config(kBob);
  alice_credo.lanes = 4;
  bob_credo.lanes = 3;
  Talk link(alice_credo, bob_credo), another(alice_credo, bob_credo);
  run(link);
  run(another);
  CHECK_EQ(link.alice.link().size(), 32u);
  CHECK_EQ(link.alice.link(), link.bob.link());
  CHECK(link.alice.link() != another.alice.link());
  CHECK(!link.alice.for_lane() && !link.bob.for_lane());
  CHECK_EQ(link.alice.lanes(), 3u);
  CHECK_EQ(link.bob.lanes(), 3u);

  Talk lane(alice_credo, bob_credo);
  lane.alice = Handshake::initiate(lane.alice_credo, kBob, {}, link.alice.link());
  CHECK(run(lane) == std::pair<std::string, std::string>("open", "open"));
  CHECK(lane.alice.for_lane() && lane.bob.for_lane());
  CHECK_EQ(lane.bob.link(), link.bob.link());

  Talk changed(alice_credo, bob_credo);  // tampered with: to become a lane of another link
  changed.alice = Handshake::initiate(changed.alice_credo, kBob, {}, link.alice.link());
  Frame hello = frame_of(changed.alice.begin());
  hello.body.back() = static_cast<char>(hello.body.back() ^ 1);
  const Frame challenge = frame_of(advance(changed.bob, hello.type, hello.body));
  const Frame proof = frame_of(advance(changed.alice, challenge.type, challenge.body));
  check_failed(advance(changed.bob, proof.type, proof.body), "secret does not match");
}

/// The acceptor gets the offered session; its answer is believed if it has proven itself.
CASE(offers_are_answered_under_the_proofs) {
  Talk t(config(kAlice), config(kBob), kBob, {.number = 3, .previous = {.mine = true, .number = 2}});
  const auto at_confirmation = [](Talk& talk) {
    const Recording r(talk);
    CHECK(talk.bob.on_frame(r.confirm.type, r.confirm.body).proven);
  };
  at_confirmation(t);
  CHECK_EQ(t.bob.offer().number, 3u);
  CHECK(t.bob.offer().previous == (SessionId{.mine = true, .number = 2}));
  Handshake alice = t.alice;
  const Frame refusal = frame_of(t.bob.refuse(OfferAnswer::kStale, "replaced"));
  check_failed(alice.on_frame(refusal.type, refusal.body), "refused by the peer: replaced");
  CHECK(alice.answer() == OfferAnswer::kStale);

  std::string forged = refusal.body;
  forged.back() = static_cast<char>(forged.back() ^ 1);
  alice = t.alice;
  check_failed(alice.on_frame(refusal.type, forged), "refused");
  CHECK(alice.answer() == OfferAnswer::kAccept);

  Talk other;
  at_confirmation(other);
  check_failed(other.alice.on_frame(refusal.type, refusal.body), "refused");  // recorded
  CHECK(other.alice.answer() == OfferAnswer::kAccept);
}

/// Each end gets the limits of the other; neither can be made to accept forged ones.
CASE(limits_are_exchanged_under_the_proofs) {
  HandshakeConfig alice_credo = config(kAlice), bob_credo = config(kBob);
  alice_credo.limits = {.body = 70'001, .message = 70'002, .segments = 70'003, .name = 70'004};
  bob_credo.limits = {.body = 80'001, .message = 80'002, .segments = 80'003, .name = 80'004};
  const auto same = [](const Limits& a, const Limits& b) {
    return a.body == b.body && a.message == b.message && a.segments == b.segments && a.name == b.name;
  };
  Talk t(alice_credo, bob_credo);
  CHECK(run(t) == std::pair<std::string, std::string>("open", "open"));
  CHECK(same(t.alice.limits(), bob_credo.limits));
  CHECK(same(t.bob.limits(), alice_credo.limits));

  const auto changed = [](std::string body, std::uint64_t limit) {
    const std::string bytes(reinterpret_cast<const char*>(&limit), sizeof limit);
    const auto at = body.find(bytes);
    CHECK(at != std::string::npos);
    body[at] = static_cast<char>(body[at] ^ 2);
    return body;
  };
  Talk asked(alice_credo, bob_credo);
  const Frame hello = frame_of(asked.alice.begin());
  const Frame challenge = frame_of(advance(asked.bob, hello.type, changed(hello.body, alice_credo.limits.message)));
  const Frame proof = frame_of(advance(asked.alice, challenge.type, challenge.body));
  check_failed(advance(asked.bob, proof.type, proof.body), "secret does not match");
  Talk answered(alice_credo, bob_credo);
  Recording r(answered);
  check_failed(advance(r.before[3].alice, r.answer.type, changed(r.answer.body, bob_credo.limits.message)),
               "secret does not match");
}

CASE(handshake_frames_fit_the_limits_of_unauthenticated_connections) {
  const std::string longest(127, 'n');
  Identity a{.id = 32767, .name = longest, .incarnation = UINT64_MAX}, b = a;
  HandshakeConfig ca = config(a, std::string(1000, 's'), std::string(128, 'g')), cb = config(b, ca.secret, ca.group);
  Talk t(ca, cb, b);
  const Recording r(t);
  for (const Frame* f : {&r.hello, &r.challenge, &r.proof, &r.answer, &r.confirm})
    CHECK(f->body.size() < kHandshakeLimits.body);
}

CASE(a_wrong_secret_is_rejected_at_both_ends) {
  Talk t(config(kAlice, "secret"), config(kBob, "another"));
  const auto [alice, bob] = run(t);
  CHECK_SAYS(bob, "secret does not match");  // Alice proves herself first
  CHECK_SAYS(alice, "refused by the peer, which logs the reason");
}

/// An acceptor gives an unauthenticated peer a nonce and nothing that depends on the secret.
CASE(the_initiator_proves_itself_first) {
  Talk t(config(kAlice), config(kBob, "another"));
  const Frame hello = frame_of(t.alice.begin());
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  CHECK_EQ(challenge.body.size(), 4u + 32u);
  CHECK(challenge.body.find("bob") == std::string::npos);
}

/// Whatever the reason, an unauthenticated peer gets the same bytes; the log gets the reason.
CASE(unauthenticated_peers_get_one_word) {
  const std::string word = std::string("\7\0\0\0", 4) + std::string(kRefused) + std::string(5, '\0');
  const auto check = [&](const Handshake::Step& step, const std::string& why) {
    check_failed(step, why);
    CHECK(*step.send == FrameType::kRefuse);
    CHECK(step.body == word);
  };
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  const Handshake fresh = t.bob;
  Handshake bob = fresh;
  std::string other = hello.body;
  ++other[0];
  check(advance(bob, hello.type, other), "protocol version");
  bob = fresh;
  check(advance(bob, hello.type, hello.body.substr(0, 20)), "malformed");
  Talk group(config(kAlice, "secret", "one"));
  const Frame foreign = frame_of(group.alice.begin());
  bob = fresh;
  check(advance(bob, foreign.type, foreign.body), "another group");
  frame_of(advance(t.bob, hello.type, hello.body));
  const std::string guess = std::string("\x20\0\0\0", 4) + std::string(32, 'x');
  check(advance(t.bob, FrameType::kProof, guess), "secret does not match");
}

CASE(an_initiator_with_the_wrong_secret_cannot_skip_the_proof) {
  Talk t(config(kAlice, "wrong"), config(kBob));
  const Frame hello = frame_of(t.alice.begin());
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  Handshake again = t.bob;
  check_failed(advance(again, FrameType::kProof, challenge.body + "x"), "malformed");
  again = t.bob;
  check_failed(advance(again, FrameType::kProof, challenge.body), "secret does not match");
  again = t.bob;
  check_failed(advance(again, FrameType::kProof, std::string(4, '\0')), "secret does not match");  // an empty proof
  for (const FrameType type : {FrameType::kWelcome, FrameType::kConfirm, FrameType::kAnswer}) {
    again = t.bob;
    check_failed(advance(again, type, ""), "out of order");
  }
}

CASE(the_wrong_group_version_or_target) {
  {
    Talk t(config(kAlice, "secret", "one"), config(kBob, "secret", "two"));
    const auto [alice, bob] = run(t);
    CHECK_SAYS(bob, "another group");
    CHECK_SAYS(alice, "refused by the peer");
  }
  for (const Identity& wanted :
       {Identity{.id = 3, .name = "bob", .incarnation = 22}, Identity{.id = 2, .name = "carol", .incarnation = 22},
        Identity{.id = 2, .name = "bob", .incarnation = 21}}) {
    Talk t(config(kAlice), config(kBob), wanted);
    const auto [alice, bob] = run(t);
    CHECK_SAYS(bob, "is not at this address");
    CHECK_SAYS(alice, "is not at this address");
  }
  Talk t;
  Frame hello = frame_of(t.alice.begin());
  ++hello.body[0];
  const auto step = advance(t.bob, hello.type, hello.body);
  check_failed(step, "version");
  CHECK(*step.send == FrameType::kRefuse);
}

CASE(a_recorded_handshake_cannot_be_replayed) {
  Talk recorded;
  const Recording r(recorded);

  Talk replayed;  // to Bob
  frame_of(advance(replayed.bob, r.hello.type, r.hello.body));
  check_failed(advance(replayed.bob, r.proof.type, r.proof.body), "secret does not match");

  Talk other;  // to Alice
  frame_of(other.alice.begin());
  frame_of(advance(other.alice, r.challenge.type, r.challenge.body));
  check_failed(advance(other.alice, r.answer.type, r.answer.body), "secret does not match");

  Talk confirmed;  // a confirmation of another handshake
  Recording own(confirmed);
  check_failed(advance(confirmed.bob, r.confirm.type, r.confirm.body), "secret does not match");
}

/// Proofs have roles: Bob's is not valid as an initiator's, and Alice's is not valid as an acceptor's.
CASE(a_reflected_proof_is_rejected) {
  Talk t;
  Recording r(t);
  const std::size_t mac = 32 + 4;  // at the end, with its length
  const std::string bobs = r.answer.body.substr(r.answer.body.size() - mac);
  check_failed(advance(r.before[2].bob, FrameType::kProof, bobs), "secret does not match");
  check_failed(advance(t.bob, FrameType::kConfirm, bobs), "secret does not match");
  const std::string forged = r.answer.body.substr(0, r.answer.body.size() - mac) + r.proof.body;
  check_failed(advance(r.before[3].alice, FrameType::kAnswer, forged), "secret does not match");
}

CASE(a_proof_for_one_worker_is_rejected_by_another) {
  // Mallory relays the frames of Alice and Carol, who has the same secret; Alice wants Bob.
  const Identity kCarol{.id = 3, .name = "carol", .incarnation = 33};
  Talk relayed(config(kAlice), config(kCarol), kBob);
  const auto [alice, carol] = run(relayed);
  CHECK_SAYS(carol, "is not at this address");
  CHECK_SAYS(alice, "is not at this address");
  // Carol answers, after the HELLO of another worker.
  Talk wanted(config(kAlice), config(kBob), kBob), other(config(kAlice), config(kCarol), kCarol);
  Recording to_carol(other);
  frame_of(wanted.alice.begin());
  frame_of(advance(wanted.alice, to_carol.challenge.type, to_carol.challenge.body));
  check_failed(advance(wanted.alice, to_carol.answer.type, to_carol.answer.body), "secret does not match");
}

/// A member that knows the secret answers under another name than the wanted one.
CASE(a_member_instead_of_another) {
  auto number = [](auto n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); };
  auto text = [&](const std::string& s) { return number(static_cast<std::uint32_t>(s.size())) + s; };
  auto answer = [&](const Identity& me, const std::string& hello) {
    const Limits l;
    const std::string limits = number(l.body) + number(l.message) + number(l.segments) + number(l.name);
    const std::string mine = number(me.id) + text(me.name) + number(me.incarnation) + limits + number(std::uint32_t{1});
    const std::string transcript = text(text(hello) + text(std::string(32, 'n'))) + text(mine);
    return text(mine) + text(hmac_sha256("secret", "acceptor" + transcript));
  };
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  frame_of(advance(t.alice, FrameType::kChallenge, text(std::string(32, 'n'))));
  Handshake alice = t.alice;
  CHECK(*advance(alice, FrameType::kAnswer, answer(kBob, hello.body)).send == FrameType::kConfirm);
  for (const Identity& me :
       {Identity{.id = 2, .name = "mallory", .incarnation = 22}, Identity{.id = 3, .name = "bob"}}) {
    alice = t.alice;
    check_failed(advance(alice, FrameType::kAnswer, answer(me, hello.body)), "instead of bob");
  }
}

/// Text of unauthenticated peers is logged by the other end.
CASE(text_of_unauthenticated_peers_is_sanitized) {
  auto text = [](const std::string& s) {
    const auto n = static_cast<std::uint32_t>(s.size());
    return std::string(reinterpret_cast<const char*>(&n), sizeof n) + s;
  };
  Talk t;
  frame_of(t.alice.begin());
  const auto step = advance(t.alice, FrameType::kRefuse, text("red\n\x1b[31m \xff" + std::string(1000, 'x')));
  CHECK_SAYS(step.failed, "refused by the peer: red\\x0a\\x1b[31m \\xffxxx");
  CHECK(step.failed.size() < 300);
}

CASE(every_frame_out_of_order_fails) {
  const std::vector<FrameType> types = {FrameType{0},        FrameType::kHello,   FrameType::kChallenge,
                                        FrameType::kProof,   FrameType::kWelcome, FrameType::kAnswer,
                                        FrameType::kConfirm, FrameType::kRequest, FrameType::kReply,
                                        FrameType::kOneway,  FrameType::kGoodbye, FrameType{255}};
  Talk t;
  const Recording r(t);
  const Handshake confirming_alice = t.alice;
  CHECK(advance(t.bob, r.confirm.type, r.confirm.body).open);
  CHECK(advance(t.alice, FrameType::kWelcome, "").open);
  const std::pair<const Handshake*, FrameType> expecting[] = {{&r.before[0].bob, FrameType::kHello},
                                                              {&r.before[1].alice, FrameType::kChallenge},
                                                              {&r.before[2].bob, FrameType::kProof},
                                                              {&r.before[3].alice, FrameType::kAnswer},
                                                              {&r.before[4].bob, FrameType::kConfirm},
                                                              {&confirming_alice, FrameType::kWelcome},
                                                              {&t.bob, FrameType{254}},
                                                              {&t.alice, FrameType{254}}};
  for (auto [state, expected] : expecting) {
    for (const FrameType type : types) {
      if (type == expected) continue;
      for (const Frame* f : {&r.hello, &r.challenge, &r.proof, &r.answer, &r.confirm}) {
        Handshake h = *state;
        check_failed(advance(h, type, f->body), "out of order");
        check_failed(advance(h, expected, r.hello.body), "out of order");  // stays failed
      }
    }
  }
}

CASE(a_rejection_has_a_reason) {
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  const std::string reason = std::string("\4\0\0\0", 4) + "nope";
  check_failed(advance(t.alice, FrameType::kRefuse, reason), "refused by the peer: nope");
  for (const std::string& odd : {std::string(), std::string("\xff\xff\xff\xffx", 5), std::string("x")}) {
    Talk other;
    frame_of(other.alice.begin());
    check_failed(advance(other.alice, FrameType::kRefuse, odd), "refused");
  }
}

/// Each frame of the handshake, with the end that receives it.
template <class Check>
void for_each_frame(Check check) {
  Talk t;
  const Recording r(t);
  const Frame* frames[] = {&r.hello, &r.challenge, &r.proof, &r.answer, &r.confirm};
  for (std::size_t i = 0; i < std::size(frames); ++i) {
    const Talk& before = r.before[i];
    check(i % 2 == 0 ? before.bob : before.alice, *frames[i], before, i == 0);
  }
}

CASE(truncated_and_overlong_bodies) {
  for_each_frame([](const Handshake& receiver, const Frame& frame, const Talk&, bool) {
    for (std::size_t n = 0; n < frame.body.size(); ++n) {
      Handshake h = receiver;
      const auto step = advance(h, frame.type, frame.body.substr(0, n));
      CHECK(!step.failed.empty() && !step.open);
    }
    Handshake h = receiver;
    check_failed(advance(h, frame.type, frame.body + "x"), "malformed");
  });
}

/// No handshake succeeds after a bit was flipped. The initiator's own claims, such as its incarnation, and the nonce of
/// the acceptor are covered by the proof: if they change, it does not match any more.
CASE(every_flipped_bit_is_detected) {
  auto flip = [](std::string s, std::size_t bit) {
    s[bit / 8] = static_cast<char>(s[bit / 8] ^ (1 << bit % 8));
    return s;
  };
  for_each_frame([&](const Handshake& receiver, const Frame& frame, const Talk& before, bool first) {
    for (std::size_t bit = 0; bit < frame.body.size() * 8; ++bit) {
      Handshake h = receiver;
      auto step = advance(h, frame.type, flip(frame.body, bit));
      if (!step.failed.empty()) continue;
      CHECK(frame.type == FrameType::kHello || frame.type == FrameType::kChallenge);
      Handshake alice = before.alice;
      if (first) {
        step = advance(alice, *step.send, step.body);
      } else {
        h = before.bob;
      }
      check_failed(advance(h, FrameType::kProof, step.body), "secret does not match");
    }
  });
}

CASE(random_bodies_are_rejected) {
  Random random(7);
  for (int i = 0; i < times(20000); ++i) {
    Talk t;
    if (i % 2) frame_of(t.alice.begin());
    Handshake& h = i % 2 ? t.alice : t.bob;
    std::string body = random.bytes(random.below(200));
    if (i % 4 == 0 && body.size() >= 4) body.replace(0, 4, std::string("\1\0\0\0", 4));  // the right version
    const auto step = advance(h, i % 2 ? FrameType::kChallenge : FrameType::kHello, body);
    CHECK(!step.failed.empty() && !step.open);
  }
}

CASE(nonces_are_fresh) {
  Talk a, b;
  CHECK(a.alice.begin().body != b.alice.begin().body);
}

}  // namespace
}  // namespace telegrad::test
