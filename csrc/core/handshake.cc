#include "core/handshake.h"

#include <sys/random.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <utility>

#include "base/crypto.h"
#include "core/link_error.h"

namespace telegrad {
namespace {

constexpr std::size_t kNonce = 32;

class Writer {
 public:
  template <class T>
  Writer& number(T value) {
    out_.append(reinterpret_cast<const char*>(&value), sizeof value);
    return *this;
  }
  Writer& text(std::string_view s) {
    number(static_cast<std::uint32_t>(s.size()));
    out_.append(s);
    return *this;
  }
  Writer& identity(const Identity& i) { return number(i.id).text(i.name).number(i.incarnation); }
  Writer& offer(const SessionOffer& o) {
    return number(o.number).number(static_cast<std::uint8_t>(o.previous.mine)).number(o.previous.number);
  }
  Writer& limits(const Limits& l) {
    return number(l.body)
        .number(l.message)
        .number(l.segments)
        .number(l.name)
        .number(l.requests)
        .number(l.request_bytes);
  }
  std::string done() { return std::move(out_); }

 private:
  std::string out_;
};

class Reader {
 public:
  explicit Reader(std::string_view in) : in_(in) {}
  template <class T>
  T number() {
    T value{};
    if (in_.size() < sizeof value) {
      good_ = false;
      return value;
    }
    std::memcpy(&value, in_.data(), sizeof value);
    in_.remove_prefix(sizeof value);
    return value;
  }
  std::string text() {
    const auto size = number<std::uint32_t>();
    if (!good_ || size > in_.size()) {
      good_ = false;
      return {};
    }
    std::string s(in_.substr(0, size));
    in_.remove_prefix(size);
    return s;
  }
  Identity identity() {
    Identity i;
    i.id = number<std::int32_t>();
    i.name = text();
    i.incarnation = number<std::uint64_t>();
    return i;
  }
  SessionOffer offer() {
    SessionOffer o;
    o.number = number<std::uint64_t>();
    o.previous.mine = number<std::uint8_t>() != 0;
    o.previous.number = number<std::uint64_t>();
    return o;
  }
  Limits limits() {
    Limits l;
    l.body = number<std::uint64_t>();
    l.message = number<std::uint64_t>();
    l.segments = number<std::uint32_t>();
    l.name = number<std::uint32_t>();
    l.requests = number<std::uint32_t>();
    l.request_bytes = number<std::uint64_t>();
    return l;
  }
  bool finished() const { return good_ && in_.empty(); }

 private:
  std::string_view in_;
  bool good_ = true;
};

std::string nonce() {
  std::string n(kNonce, '\0');
  if (getrandom(n.data(), n.size(), 0) != static_cast<ssize_t>(n.size())) {
    throw std::runtime_error("the system returned no random bytes");
  }
  return n;
}

/// Makes text of an unauthenticated peer safe to log: printable characters, bounded length.
std::string printable(std::string_view text) {
  constexpr std::size_t kMost = 200;
  std::string out;
  for (const char c : text.substr(0, kMost)) {
    if (c >= ' ' && c <= '~') {
      out += c;
    } else {
      const auto byte = static_cast<unsigned char>(c);
      out += "\\x";
      out += "0123456789abcdef"[byte >> 4];
      out += "0123456789abcdef"[byte & 15];
    }
  }
  return text.size() > kMost ? out + "..." : out;
}

constexpr const char* kRefusedByPeer =
    "refused by the peer, which logs the reason: this worker has another secret, group or version of Telegrad than the "
    "peer";

}  // namespace

Handshake Handshake::initiate(const HandshakeConfig& config, const Identity& target, const SessionOffer& offer,
                              Purpose purpose, std::string link) {
  Handshake h(config);
  h.initiator_ = true;
  h.peer_ = target;
  h.offer_ = offer;
  h.purpose_ = purpose;
  h.link_ = std::move(link);
  return h;
}

Handshake Handshake::accept(const HandshakeConfig& config) { return Handshake(config); }

Handshake::Step Handshake::begin() {
  hello_ = Writer()
               .number(kProtocolVersion)
               .text(config_->group)
               .identity(config_->me)
               .identity(peer_)
               .text(nonce())
               .limits(config_->limits)
               .number(config_->lanes)
               .number(static_cast<std::uint8_t>(config_->resume))
               .offer(offer_)
               .number(purpose_)
               .text(link_)
               .done();
  state_ = State::kSentHello;
  return {.send = FrameType::kHello, .body = hello_};
}

Handshake::Step Handshake::on_frame(FrameType type, std::string_view body) {
  if (type == FrameType::kRefuse) return on_refuse(body);
  if (state_ == State::kStart && type == FrameType::kHello) return on_hello(body);
  if (state_ == State::kSentHello && type == FrameType::kChallenge) return on_challenge(body);
  if (state_ == State::kSentChallenge && type == FrameType::kProof) return on_proof(body);
  if (state_ == State::kSentProof && type == FrameType::kAnswer) return on_answer(body);
  if (state_ == State::kSentAnswer && type == FrameType::kConfirm) return on_confirm(body);
  if (state_ == State::kSentConfirm && type == FrameType::kWelcome) return on_welcome(body);
  return fail("a frame out of order in the handshake (type " + std::to_string(static_cast<int>(type)) + ")");
}

Handshake::Step Handshake::on_hello(std::string_view body) {
  Reader in(body);
  const auto version = in.number<std::uint32_t>();
  if (version != kProtocolVersion) {
    return refuse_unauthenticated("protocol version " + std::to_string(version) + " is not " +
                                  std::to_string(kProtocolVersion) + ": run one version of telegrad on all workers");
  }
  const std::string group = in.text();
  peer_ = in.identity();
  wanted_ = in.identity();
  const std::string their_nonce = in.text();
  limits_ = in.limits();
  lanes_ = std::min(in.number<std::uint32_t>(), config_->lanes);
  resumes_ = in.number<std::uint8_t>() != 0 && config_->resume;
  offer_ = in.offer();
  purpose_ = in.number<Purpose>();
  link_ = in.text();
  const bool good = purpose_ <= Purpose::kResume && link_.empty() == (purpose_ == Purpose::kSession);
  if (!in.finished() || !good || their_nonce.size() != kNonce) return refuse_unauthenticated("a malformed greeting");
  if (group != config_->group) return refuse_unauthenticated("it belongs to another group");
  const std::string mine = nonce();
  transcript_ = Writer().text(body).text(mine).done();
  state_ = State::kSentChallenge;
  return {.send = FrameType::kChallenge, .body = Writer().text(mine).done()};
}

Handshake::Step Handshake::on_challenge(std::string_view body) {
  Reader in(body);
  const std::string theirs = in.text();
  if (!in.finished() || theirs.size() != kNonce) return refuse_unauthenticated("a malformed challenge");
  transcript_ = Writer().text(hello_).text(theirs).done();
  state_ = State::kSentProof;
  return {.send = FrameType::kProof, .body = Writer().text(mac("initiator", transcript_)).done()};
}

Handshake::Step Handshake::on_proof(std::string_view body) {
  Reader in(body);
  const std::string proof = in.text();
  if (!in.finished()) return refuse_unauthenticated("a malformed proof");
  if (!equal_in_constant_time(proof, mac("initiator", transcript_))) return refuse_wrong_secret();
  const Identity& me = config_->me;
  if (wanted_.id != me.id || wanted_.name != me.name ||
      (wanted_.incarnation != 0 && wanted_.incarnation != me.incarnation)) {
    const OfferAnswer answer = purpose_ == Purpose::kResume ? OfferAnswer::kEnded : OfferAnswer::kAccept;
    return refuse(answer, "worker " + printable(wanted_.name) + " (id " + std::to_string(wanted_.id) +
                              ") is not at this address, which belongs to " + me.name + " (id " +
                              std::to_string(me.id) + ")");
  }
  const std::string mine = Writer()
                               .identity(me)
                               .limits(config_->limits)
                               .number(config_->lanes)
                               .number(static_cast<std::uint8_t>(config_->resume))
                               .done();
  transcript_ = Writer().text(transcript_).text(mine).done();
  state_ = State::kSentAnswer;
  return {.send = FrameType::kAnswer, .body = Writer().text(mine).text(mac("acceptor", transcript_)).done()};
}

Handshake::Step Handshake::on_answer(std::string_view body) {
  Reader in(body);
  const std::string theirs = in.text();
  const std::string proof = in.text();
  Reader fields(theirs);
  const Identity peer = fields.identity();
  limits_ = fields.limits();
  lanes_ = std::min(fields.number<std::uint32_t>(), config_->lanes);
  resumes_ = fields.number<std::uint8_t>() != 0 && config_->resume;
  if (!in.finished() || !fields.finished()) return refuse_unauthenticated("a malformed answer");
  transcript_ = Writer().text(transcript_).text(theirs).done();
  if (!equal_in_constant_time(proof, mac("acceptor", transcript_))) return refuse_wrong_secret();
  if (peer.id != peer_.id || peer.name != peer_.name)
    return refuse(OfferAnswer::kAccept, "worker " + printable(peer.name) + " answered instead of " + peer_.name);
  peer_ = peer;
  state_ = State::kProven;
  return {.proven = true};
}

Handshake::Step Handshake::on_confirm(std::string_view body) {
  Reader in(body);
  received_ = in.number<std::uint64_t>();
  const std::string proof = in.text();
  if (!in.finished()) return refuse_unauthenticated("a malformed confirmation");
  transcript_ = Writer().text(transcript_).number(received_).done();
  if (!equal_in_constant_time(proof, mac("confirm", transcript_))) return refuse_wrong_secret();
  state_ = State::kProven;
  return {.proven = true};
}

Handshake::Step Handshake::on_welcome(std::string_view body) {
  Reader in(body);
  received_ = in.number<std::uint64_t>();
  if (!in.finished()) return fail("a malformed welcome");
  open();
  return {.open = true};
}

Handshake::Step Handshake::proceed(std::uint64_t received) {
  if (!initiator_) {
    open();
    return {.send = FrameType::kWelcome, .body = Writer().number(received).done(), .open = true};
  }
  state_ = State::kSentConfirm;
  transcript_ = Writer().text(transcript_).number(received).done();
  return {.send = FrameType::kConfirm, .body = Writer().number(received).text(mac("confirm", transcript_)).done()};
}

void Handshake::open() {
  state_ = State::kOpen;
  if (purpose_ == Purpose::kSession) link_ = mac("link", transcript_);
}

Handshake::Step Handshake::refuse(OfferAnswer answer, std::string why) {
  state_ = State::kFailed;
  const std::string reason = Writer().text(why).number(answer).done();
  return {.send = FrameType::kRefuse,
          .body = reason + Writer().text(mac("refuse", reason + transcript_)).done(),
          .failed = std::move(why)};
}

Handshake::Step Handshake::on_refuse(std::string_view body) {
  Reader in(body);
  const std::string why = in.text();
  const auto answer = in.number<OfferAnswer>();
  const std::string reason = Writer().text(why).number(answer).done();
  const bool authentic = (state_ == State::kSentProof || state_ == State::kSentConfirm) &&
                         equal_in_constant_time(in.text(), mac("refuse", reason + transcript_));
  if (authentic) answer_ = answer;
  Step step = fail(why == kRefused ? kRefusedByPeer : "refused by the peer: " + printable(why));
  step.code = kRefusalCode;
  return step;
}

/// Rejects an end that has not proven itself.
Handshake::Step Handshake::refuse_unauthenticated(std::string why) {
  state_ = State::kFailed;
  return {.send = FrameType::kRefuse,
          .body = Writer().text(kRefused).number(OfferAnswer::kAccept).text("").done(),
          .failed = std::move(why)};
}

Handshake::Step Handshake::refuse_wrong_secret() {
  Step step = refuse_unauthenticated("the group's secret does not match");
  step.code = kRefusalCode;
  return step;
}

Handshake::Step Handshake::fail(std::string why) {
  state_ = State::kFailed;
  return {.failed = std::move(why)};
}

std::string Handshake::mac(std::string_view label, std::string_view transcript) const {
  return hmac_sha256(config_->secret, std::string(label) + std::string(transcript));
}

}  // namespace telegrad
