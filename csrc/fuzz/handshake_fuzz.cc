// Two ends of a handshake, and an attacker between them that has no secret.
//
// Input: a byte of settings, then the attacker's choices: it passes a frame on, changes a byte of it, repeats an old
// one, drops it, or makes one of its own. An end opens only if both have sent the same frames, and both ends then
// agree.
#include <deque>
#include <string>
#include <vector>

#include "core/handshake.h"
#include "fuzz/input.h"

namespace telegrad::fuzz {
namespace {

struct Frame {
  FrameType type;
  std::string body;
};

struct End {
  explicit End(Handshake handshake) : handshake(std::move(handshake)) {}
  Handshake handshake;
  std::deque<Frame> to_read;  // frames of the other end, which the attacker holds
  bool proven = false, open = false, failed = false;
};

class Talk {
 public:
  explicit Talk(std::uint8_t settings)
      : alice_{.me = {.id = 1, .name = "alice", .incarnation = 11}, .group = "group", .secret = "secret", .lanes = 4},
        bob_{.me = {.id = 2, .name = "bob", .incarnation = 22}, .group = "group", .secret = "secret", .lanes = 2},
        refuses_(settings & 1),
        initiator_(
            Handshake::initiate(alice_, bob_.me, {.number = 7}, Purpose::kSession, settings & 2 ? "the link" : "")),
        acceptor_(Handshake::accept(bob_)) {
    process(initiator_, acceptor_, initiator_.handshake.begin());
  }

  void attack(Input& in) {
    const std::uint8_t choice = in.byte();
    End& to = choice & 1 ? acceptor_ : initiator_;
    End& from = choice & 1 ? initiator_ : acceptor_;
    Frame frame{.type = static_cast<FrameType>(choice >> 4), .body = {}};
    enum { kPass, kChange, kRepeat, kForge };
    const int what = choice >> 1 & 3;
    if (what == kForge) {
      frame.body = in.take(in.number<std::uint16_t>());
    } else if (what == kRepeat) {
      if (seen_.empty()) return;
      frame = seen_[in.byte() % seen_.size()];
    } else {
      if (to.to_read.empty()) return;
      frame = std::move(to.to_read.front());
      to.to_read.pop_front();
      if (what == kChange && !change(frame, in)) return;
    }
    if (to.failed) return;
    process(to, from, to.handshake.on_frame(frame.type, frame.body));
  }

  void check() const {
    const Handshake &a = initiator_.handshake, &b = acceptor_.handshake;
    // WELCOME carries no MAC: in plain text, an attacker can forge it, but opens only the initiator's end.
    if (acceptor_.open) require(initiator_.proven && acceptor_.proven, "the acceptor opens once both are proven");
    if (initiator_.open) require(initiator_.proven, "the initiator opens once the acceptor is proven");
    if (initiator_.open && acceptor_.open) {
      require(a.link() == b.link() && a.for_lane() == b.for_lane(), "both ends know the same link");
      require(a.peer().name == "bob" && b.peer().name == "alice", "both ends know each other");
      require(a.lanes() == 2 && b.lanes() == 2, "both ends use the lower number of lanes");
      require(b.offer().number == 7, "the acceptor has the initiator's offer");
    }
    if (acceptor_.proven) require(b.peer().id == 1 && b.peer().incarnation == 11, "only the true initiator is proven");
    if (initiator_.proven) require(a.peer().incarnation == 22, "only the true acceptor is proven");
  }

 private:
  /// Changes one byte, or cuts the frame. Returns false if it is dropped.
  static bool change(Frame& frame, Input& in) {
    const std::size_t at = in.number<std::uint16_t>();
    const std::uint8_t bits = in.byte();
    if (bits == 0 || at > frame.body.size()) return false;
    if (at == frame.body.size()) {
      frame.body.push_back(static_cast<char>(bits));
    } else if (bits == 0xff) {
      frame.body.resize(at);
    } else {
      frame.body[at] = static_cast<char>(frame.body[at] ^ bits);
    }
    return true;
  }

  void process(End& end, End& other, Handshake::Step step) {
    send(other, step);
    if (step.proven) {
      end.proven = true;
      step = refuses_ ? end.handshake.refuse(OfferAnswer::kBusy, "busy") : end.handshake.proceed();
      send(other, step);
    }
    end.open = end.open || step.open;
    end.failed = end.failed || !step.failed.empty();
  }

  void send(End& to, const Handshake::Step& step) {
    if (!step.send) return;
    seen_.push_back({*step.send, step.body});
    to.to_read.push_back(seen_.back());
  }

  const HandshakeConfig alice_, bob_;
  const bool refuses_;
  End initiator_, acceptor_;
  std::vector<Frame> seen_;
};

void run(Input in) {
  Talk talk(in.byte());
  while (!in.empty()) {
    talk.attack(in);
    talk.check();
  }
}

}  // namespace
}  // namespace telegrad::fuzz

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  telegrad::fuzz::run({data, size});
  return 0;
}
