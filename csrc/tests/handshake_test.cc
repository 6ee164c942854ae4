// The handshake: accepted peers, what the frames carry, and malformed frames.
#include "base/crypto.h"
#include "tests/handshake_talk.h"

namespace telegrad::test {
namespace {

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
  HandshakeConfig alice_config = config(kAlice), bob_config = config(kBob);
  alice_config.lanes = 4;
  bob_config.lanes = 3;
  Talk link(alice_config, bob_config), another(alice_config, bob_config);
  run(link);
  run(another);
  CHECK_EQ(link.alice.link().size(), 32u);
  CHECK_EQ(link.alice.link(), link.bob.link());
  CHECK(link.alice.link() != another.alice.link());
  CHECK(!link.alice.for_lane() && !link.bob.for_lane());
  CHECK_EQ(link.alice.lanes(), 3u);
  CHECK_EQ(link.bob.lanes(), 3u);

  Talk lane(alice_config, bob_config);
  lane.alice = Handshake::initiate(lane.alice_config, kBob, {}, Purpose::kLane, link.alice.link());
  CHECK(run(lane) == std::pair<std::string, std::string>("open", "open"));
  CHECK(lane.alice.for_lane() && lane.bob.for_lane());
  CHECK_EQ(lane.bob.link(), link.bob.link());

  Talk changed(alice_config, bob_config);  // tampered with: to become a lane of another link
  changed.alice = Handshake::initiate(changed.alice_config, kBob, {}, Purpose::kLane, link.alice.link());
  Frame hello = frame_of(changed.alice.begin());
  hello.body.back() = static_cast<char>(hello.body.back() ^ 1);
  const Frame challenge = frame_of(advance(changed.bob, hello.type, hello.body));
  const Frame proof = frame_of(advance(changed.alice, challenge.type, challenge.body));
  check_failed(advance(changed.bob, proof.type, proof.body), "secret does not match");
}

/// Both ends state what has arrived; the acceptor believes it under the proof.
CASE(continuations_state_what_has_arrived) {
  HandshakeConfig alice_config = config(kAlice), bob_config = config(kBob);
  alice_config.resume = true;
  for (const bool both : {false, true}) {
    bob_config.resume = both;
    Talk link(alice_config, bob_config);
    CHECK(run(link) == std::pair<std::string, std::string>("open", "open"));
    CHECK_EQ(link.alice.resumes(), both);
    CHECK_EQ(link.bob.resumes(), both);
    for (const bool tampered : {false, true}) {
      Talk next(alice_config, bob_config);
      next.alice = Handshake::initiate(next.alice_config, kBob, {.number = 4, .previous = {}}, Purpose::kResume,
                                       link.alice.link());
      const Frame hello = frame_of(next.alice.begin());
      const Frame challenge = frame_of(next.bob.on_frame(hello.type, hello.body));
      const Frame proof = frame_of(next.alice.on_frame(challenge.type, challenge.body));
      const Frame answer = frame_of(next.bob.on_frame(proof.type, proof.body));
      CHECK(next.alice.on_frame(answer.type, answer.body).proven);
      Frame confirm = frame_of(next.alice.proceed(5));
      if (tampered) {
        confirm.body[0] = 6;
        check_failed(next.bob.on_frame(confirm.type, confirm.body), "secret does not match");
        continue;
      }
      CHECK(next.bob.on_frame(confirm.type, confirm.body).proven);
      CHECK(next.bob.purpose() == Purpose::kResume);
      CHECK_EQ(next.bob.link(), link.bob.link());
      CHECK_EQ(next.bob.offer().number, 4u);
      CHECK_EQ(next.bob.received(), 5u);
      const Frame welcome = frame_of(next.bob.proceed(7));
      CHECK(next.alice.on_frame(welcome.type, welcome.body).open);
      CHECK_EQ(next.alice.received(), 7u);
    }
  }
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
  HandshakeConfig alice_config = config(kAlice), bob_config = config(kBob);
  alice_config.limits = {.body = 70'001, .message = 70'002, .segments = 70'003, .name = 70'004};
  bob_config.limits = {.body = 80'001, .message = 80'002, .segments = 80'003, .name = 80'004};
  const auto same = [](const Limits& a, const Limits& b) {
    return a.body == b.body && a.message == b.message && a.segments == b.segments && a.name == b.name;
  };
  Talk t(alice_config, bob_config);
  CHECK(run(t) == std::pair<std::string, std::string>("open", "open"));
  CHECK(same(t.alice.limits(), bob_config.limits));
  CHECK(same(t.bob.limits(), alice_config.limits));

  const auto changed = [](std::string body, std::uint64_t limit) {
    const std::string bytes(reinterpret_cast<const char*>(&limit), sizeof limit);
    const auto at = body.find(bytes);
    CHECK(at != std::string::npos);
    body[at] = static_cast<char>(body[at] ^ 2);
    return body;
  };
  Talk asked(alice_config, bob_config);
  const Frame hello = frame_of(asked.alice.begin());
  const Frame challenge = frame_of(advance(asked.bob, hello.type, changed(hello.body, alice_config.limits.message)));
  const Frame proof = frame_of(advance(asked.alice, challenge.type, challenge.body));
  check_failed(advance(asked.bob, proof.type, proof.body), "secret does not match");
  Talk answered(alice_config, bob_config);
  Recording r(answered);
  check_failed(advance(r.before[3].alice, r.answer.type, changed(r.answer.body, bob_config.limits.message)),
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
  CHECK(advance(t.alice, FrameType::kWelcome, std::string(8, '\0')).open);
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
