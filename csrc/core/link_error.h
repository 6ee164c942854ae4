// Why a link has ended or a connection is closed: a text for logs and errors, and a code for decisions.
#pragma once

#include <algorithm>
#include <cerrno>
#include <iterator>
#include <string>
#include <system_error>
#include <utility>

#include "wire/constants.h"

namespace telegrad {

using wire::Loss;

/// Code of a refusal in the handshake: the other end has refused this one, or has not proven the group's secret. No
/// system call of a socket fails with it.
inline constexpr int kRefusalCode = EKEYREJECTED;
/// Code of the end of a handshake with an older process of the peer.
inline constexpr int kOlderCode = ESTALE;

struct LinkError {
  LinkError() = default;  // a plain end of stream
  LinkError(std::string why, int code) : text(std::move(why)), code(code) {}
  /// A reason other than a failed system call or a refusal; "": a plain end of stream.
  LinkError(std::string why) : text(std::move(why)), code(text.empty() ? 0 : EPROTO) {}  // NOLINT(*-explicit-*)
  LinkError(const char* why) : LinkError(std::string(why)) {}                            // NOLINT(*-explicit-*)

  /// Returns the error of a failed system call.
  static LinkError of_call(int code) { return {std::generic_category().message(code), code}; }

  LinkError with_context(const std::string& context) const { return {context + ": " + text, code}; }

  /// Returns whether the worker may still be at its address, but the worker or the network is busy. All other errors,
  /// above all a refused connection, mean that the worker is not there.
  bool is_transient() const {
    constexpr int kTransientErrors[] = {0,           EAGAIN,    EINTR,    ETIMEDOUT,  EHOSTUNREACH,
                                        ENETUNREACH, EHOSTDOWN, ENETDOWN, ECONNRESET, ECONNABORTED,
                                        EPIPE,       EMFILE,    ENFILE,   ENOBUFS,    ENOMEM};
    return std::find(std::begin(kTransientErrors), std::end(kTransientErrors), code) != std::end(kTransientErrors);
  }

  /// Returns the kind of loss of a peer whose connection this has ended.
  Loss loss() const {
    if (code == 0) return Loss::kClosed;
    if (code == kOlderCode) return Loss::kOlder;
    return code == kRefusalCode ? Loss::kRefused : Loss::kOther;
  }

  std::string text;
  int code = 0;  // errno of a failed system call, one of those above, EPROTO for any other; 0: a plain end of stream
};

}  // namespace telegrad
