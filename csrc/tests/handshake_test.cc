// The handshake: accepted peers, and every way to be rejected.
#include "core/handshake.h"

#include <deque>
#include <utility>
#include <vector>

#include "core/sha256.h"
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
  check_failed(advance(changed.alice, challenge.type, challenge.body), "secret does not match");
}

/// The acceptor gets the offered session; its answer is believed if it has proven itself.
CASE(offers_are_answered_under_the_proofs) {
  Talk t(config(kAlice), config(kBob), kBob, {.number = 3, .previous = {.mine = true, .number = 2}});
  const auto at_proof = [](Talk& talk) {
    const Frame hello = frame_of(talk.alice.begin());
    const Frame challenge = frame_of(advance(talk.bob, hello.type, hello.body));
    const Frame proof = frame_of(advance(talk.alice, challenge.type, challenge.body));
    CHECK(talk.bob.on_frame(proof.type, proof.body).proven);
  };
  at_proof(t);
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
  at_proof(other);
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
  check_failed(advance(asked.alice, challenge.type, challenge.body), "secret does not match");
  Talk answered(alice_credo, bob_credo);
  const Frame first = frame_of(answered.alice.begin());
  const Frame second = frame_of(advance(answered.bob, first.type, first.body));
  check_failed(advance(answered.alice, second.type, changed(second.body, bob_credo.limits.message)),
               "secret does not match");
}

CASE(handshake_frames_fit_the_limits_of_unauthenticated_connections) {
  const std::string longest(127, 'n');
  Identity a{.id = 32767, .name = longest, .incarnation = UINT64_MAX}, b = a;
  HandshakeConfig ca = config(a, std::string(1000, 's'), std::string(128, 'g')), cb = config(b, ca.secret, ca.group);
  Handshake alice = Handshake::initiate(ca, b, {}), bob = Handshake::accept(cb);
  const Frame hello = frame_of(alice.begin());
  const Frame challenge = frame_of(advance(bob, hello.type, hello.body));
  const Frame proof = frame_of(advance(alice, challenge.type, challenge.body));
  for (const Frame* f : {&hello, &challenge, &proof}) CHECK(f->body.size() < kHandshakeLimits.body);
}

CASE(a_wrong_secret_is_rejected_at_both_ends) {
  Talk t(config(kAlice, "secret"), config(kBob, "another"));
  const auto [alice, bob] = run(t);
  CHECK_SAYS(alice, "secret does not match");  // Bob's proof is the first wrong one
  CHECK_SAYS(bob, "secret does not match");    // and Alice reports it
}

CASE(an_initiator_with_the_wrong_secret_cannot_skip_the_proof) {
  Talk t(config(kAlice, "wrong"), config(kBob));
  const Frame hello = frame_of(t.alice.begin());
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  // Ignores Bob's proof and sends a proof of its own.
  Handshake again = t.bob;
  check_failed(advance(again, FrameType::kProof, challenge.body), "malformed");
  again = t.bob;
  const std::string guess = std::string("\x20\0\0\0", 4) + std::string(32, 'x');
  check_failed(advance(again, FrameType::kProof, guess), "secret does not match");
  again = t.bob;
  check_failed(advance(again, FrameType::kProof, std::string(4, '\0')), "secret does not match");  // an empty proof
  again = t.bob;
  check_failed(advance(again, FrameType::kWelcome, ""), "out of order");
}

CASE(the_wrong_group_version_or_target) {
  {
    Talk t(config(kAlice, "secret", "one"), config(kBob, "secret", "two"));
    const auto [alice, bob] = run(t);
    CHECK_SAYS(bob, "another group");
    CHECK_SAYS(alice, "another group");
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
  const Frame hello = frame_of(recorded.alice.begin());
  const Frame challenge = frame_of(advance(recorded.bob, hello.type, hello.body));
  const Frame proof = frame_of(advance(recorded.alice, challenge.type, challenge.body));

  Talk replayed;  // to Bob
  frame_of(advance(replayed.bob, hello.type, hello.body));
  check_failed(advance(replayed.bob, proof.type, proof.body), "secret does not match");

  Talk other;  // to Alice
  frame_of(other.alice.begin());
  check_failed(advance(other.alice, challenge.type, challenge.body), "secret does not match");
}

/// Bob's proof as an acceptor is not valid as an initiator's.
CASE(a_reflected_proof_is_rejected) {
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  const std::size_t mac = 32 + 4;  // at the end, with its length
  check_failed(advance(t.bob, FrameType::kProof, challenge.body.substr(challenge.body.size() - mac)),
               "secret does not match");
}

CASE(a_proof_for_one_worker_is_rejected_by_another) {
  // Mallory relays Alice's HELLO for Bob to Carol with the same secret.
  const Identity kCarol{.id = 3, .name = "carol", .incarnation = 33};
  HandshakeConfig alice_credo = config(kAlice), carol_credo = config(kCarol);
  Handshake alice = Handshake::initiate(alice_credo, kBob, {}), carol = Handshake::accept(carol_credo);
  const Frame hello = frame_of(alice.begin());
  check_failed(advance(carol, hello.type, hello.body), "is not at this address");
  // Carol answers instead of Bob, after the HELLO of another worker.
  Handshake mallory = Handshake::initiate(alice_credo, kCarol, {});
  const Frame to_carol = frame_of(mallory.begin());
  carol = Handshake::accept(carol_credo);
  const Frame from_carol = frame_of(advance(carol, to_carol.type, to_carol.body));
  check_failed(advance(alice, from_carol.type, from_carol.body), "secret does not match");
}

/// A member that knows the secret answers under another name than the wanted one.
CASE(a_member_instead_of_another) {
  auto number = [](auto n) { return std::string(reinterpret_cast<const char*>(&n), sizeof n); };
  auto text = [&](const std::string& s) { return number(static_cast<std::uint32_t>(s.size())) + s; };
  auto answer = [&](const Identity& me, const std::string& hello) {
    const Limits l;
    const std::string limits = number(l.body) + number(l.message) + number(l.segments) + number(l.name);
    const std::string mine = number(me.id) + text(me.name) + number(me.incarnation) + text(std::string(32, 'n')) +
                             limits + number(std::uint32_t{1});
    return text(mine) + text(hmac_sha256("secret", "acceptor" + text(hello) + text(mine)));
  };
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  Handshake alice = t.alice;
  CHECK(*advance(alice, FrameType::kChallenge, answer(kBob, hello.body)).send == FrameType::kProof);
  for (const Identity& me :
       {Identity{.id = 2, .name = "mallory", .incarnation = 22}, Identity{.id = 3, .name = "bob"}}) {
    alice = t.alice;
    check_failed(advance(alice, FrameType::kChallenge, answer(me, hello.body)), "instead of bob");
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
  const std::vector<FrameType> types = {
      FrameType{0},        FrameType::kHello, FrameType::kChallenge, FrameType::kProof,   FrameType::kWelcome,
      FrameType::kRequest, FrameType::kReply, FrameType::kOneway,    FrameType::kGoodbye, FrameType{255}};
  Talk t;
  const Handshake fresh_bob = t.bob;
  const Frame hello = frame_of(t.alice.begin());
  const Handshake greeting_alice = t.alice;
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  const Handshake challenging_bob = t.bob;
  const Frame proof = frame_of(advance(t.alice, challenge.type, challenge.body));
  const Handshake proving_alice = t.alice;
  CHECK(advance(t.bob, proof.type, proof.body).open);
  CHECK(advance(t.alice, FrameType::kWelcome, "").open);
  const std::pair<const Handshake*, FrameType> expecting[] = {{&fresh_bob, FrameType::kHello},
                                                              {&greeting_alice, FrameType::kChallenge},
                                                              {&challenging_bob, FrameType::kProof},
                                                              {&proving_alice, FrameType::kWelcome},
                                                              {&t.bob, FrameType{254}},
                                                              {&t.alice, FrameType{254}}};
  for (auto [state, expected] : expecting) {
    for (const FrameType type : types) {
      if (type == expected) continue;
      for (const std::string& body : {hello.body, challenge.body, proof.body, std::string()}) {
        Handshake h = *state;
        check_failed(advance(h, type, body), "out of order");
        check_failed(advance(h, expected, hello.body), "out of order");  // stays failed
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

CASE(truncated_and_overlong_bodies) {
  Talk t;
  const Frame hello = frame_of(t.alice.begin());
  for (std::size_t n = 0; n < hello.body.size(); ++n) {
    Handshake bob = t.bob;
    const auto step = advance(bob, hello.type, hello.body.substr(0, n));
    CHECK(!step.failed.empty() && !step.open);
  }
  Handshake copy = t.bob;
  check_failed(advance(copy, hello.type, hello.body + "x"), "malformed");
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  for (std::size_t n = 0; n < challenge.body.size(); ++n) {
    Handshake alice = t.alice;
    const auto step = advance(alice, challenge.type, challenge.body.substr(0, n));
    CHECK(!step.failed.empty() && !step.open);
  }
  copy = t.alice;
  check_failed(advance(copy, challenge.type, challenge.body + "x"), "malformed");
  const Frame proof = frame_of(advance(t.alice, challenge.type, challenge.body));
  for (std::size_t n = 0; n < proof.body.size(); ++n) {
    Handshake bob = t.bob;
    const auto step = advance(bob, proof.type, proof.body.substr(0, n));
    CHECK(!step.failed.empty() && !step.open);
  }
  copy = t.bob;
  check_failed(advance(copy, proof.type, proof.body + "x"), "malformed");
}

/// No handshake succeeds after a bit was flipped. The initiator's own claims, such as its incarnation, are covered by
/// its own proof; if they change, Bob's answer or Alice's proof does not match any more.
CASE(every_flipped_bit_is_detected) {
  auto flip = [](std::string s, std::size_t bit) {
    s[bit / 8] = static_cast<char>(s[bit / 8] ^ (1 << bit % 8));
    return s;
  };
  Talk t;
  const Handshake fresh_bob = t.bob;
  const Frame hello = frame_of(t.alice.begin());
  for (std::size_t bit = 0; bit < hello.body.size() * 8; ++bit) {
    Handshake alice = t.alice, bob = fresh_bob;
    const auto step = advance(bob, hello.type, flip(hello.body, bit));
    if (!step.failed.empty()) continue;
    const Frame challenge = frame_of(step);
    check_failed(advance(alice, challenge.type, challenge.body), "secret does not match");
  }
  const Frame challenge = frame_of(advance(t.bob, hello.type, hello.body));
  for (std::size_t bit = 0; bit < challenge.body.size() * 8; ++bit) {
    Handshake alice = t.alice;
    CHECK(!advance(alice, challenge.type, flip(challenge.body, bit)).failed.empty());
  }
  const Frame proof = frame_of(advance(t.alice, challenge.type, challenge.body));
  for (std::size_t bit = 0; bit < proof.body.size() * 8; ++bit) {
    Handshake bob = t.bob;
    CHECK(!advance(bob, proof.type, flip(proof.body, bit)).failed.empty());
  }
  CHECK(advance(t.bob, proof.type, proof.body).open);
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
