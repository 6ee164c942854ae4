#include "core/session.h"

namespace telegrad {

void SessionAgreement::meet(std::uint64_t incarnation) {
  if (incarnation <= incarnation_) return;
  incarnation_ = incarnation;
  accepted_ = 0;
  previous_ = {};
}

SessionOffer SessionAgreement::dial() {
  dial_ = Dial{.number = ++dials_};
  return {.number = dials_, .previous = previous_};
}

bool SessionAgreement::confirm(std::uint64_t incarnation) {
  if (incarnation < incarnation_) return false;
  meet(incarnation);
  dial_->confirmed = true;
  return true;
}

void SessionAgreement::open_dial() {
  session_ = {.mine = true, .number = dial_->number};
  dial_.reset();
}

OfferVerdict SessionAgreement::judge(std::uint64_t incarnation, const SessionOffer& offer) const {
  if (incarnation < incarnation_) return {.answer = OfferAnswer::kStale};
  OfferVerdict verdict{.answer = OfferAnswer::kAccept};
  if (incarnation > incarnation_ && incarnation_ != 0) {
    verdict.ends_session = is_open();
    verdict.ends_dial = has_dial();
  } else if (offer.number <= accepted_) {
    verdict.answer = OfferAnswer::kOutdated;
  } else if (is_open()) {
    // The initiator's last session, seen from here.
    const SessionId last{.mine = !offer.previous.mine, .number = offer.previous.number};
    verdict.ends_session = !session_.mine || last == session_;
    if (!verdict.ends_session) verdict.answer = OfferAnswer::kBusy;
  } else if (has_dial()) {
    verdict.ends_dial = !wins_ || !has_confirmed();
    if (!verdict.ends_dial) verdict.answer = OfferAnswer::kBusy;
  }
  return verdict;
}

void SessionAgreement::accept(std::uint64_t incarnation, const SessionOffer& offer) {
  meet(incarnation);
  accepted_ = offer.number;
  session_ = {.mine = false, .number = offer.number};
}

void SessionAgreement::end() {
  previous_ = session_;
  session_ = {};
}

}  // namespace telegrad
