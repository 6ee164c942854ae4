// The handshake: peers without the secret, recorded and relayed frames, and members in the place of others.
#include "base/crypto.h"
#include "tests/handshake_talk.h"

namespace telegrad::test {
namespace {

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
  check_failed(advance(t.bob, FrameType::kConfirm, std::string(8, '\0') + bobs), "secret does not match");
  const std::string forged = r.answer.body.substr(0, r.answer.body.size() - mac) + r.proof.body;
  check_failed(advance(r.before[3].alice, FrameType::kAnswer, forged), "secret does not match");
}

CASE(a_proof_for_one_worker_is_rejected_by_another) {
  // An attacker relays the frames of two workers with the same secret; the initiator wants a third one.
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
    const std::string limits = number(l.body) + number(l.message) + number(l.segments) + number(l.name) +
                               number(l.requests) + number(l.request_bytes);
    const std::string mine = number(me.id) + text(me.name) + number(me.incarnation) + limits +
                             number(std::uint32_t{1}) + number(std::uint8_t{0});
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

}  // namespace
}  // namespace telegrad::test
