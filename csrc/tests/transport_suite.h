// The conformance suite of the transport contract, core/transport.h. Its functions are in transport_*_test.cc; each
// runs on every scheme of `kSchemes`.
#pragma once

#include <initializer_list>
#include <string>
#include <vector>

#include "base/crypto.h"
#include "tests/links.h"

namespace telegrad::test {

using Scheme = const std::string&;

inline constexpr std::size_t kKiB = 1024;

inline constexpr const char* kSchemes[] = {
    "shm",    "unix", "tcp", "tls", "lanes", "tls-lanes",  // tcp and tls with lanes, see Ends
    "inproc",
};

struct SuiteRow {
  const char* name;
  void (*run)(Scheme);
  bool of_links;  // else about connecting, which the engine does for lanes
};
#define ON_LINKS(f) {#f, f, true}
#define ON_TRANSPORTS(f) {#f, f, false}

/// Adds a case for each function and scheme. Returns true, for an initializer.
inline bool add_on_every_scheme(std::initializer_list<SuiteRow> rows) {
  for (const std::string scheme : kSchemes) {
    for (const SuiteRow& row : rows) {
      if (scheme.starts_with("tls") && !has_crypto()) continue;
      if (scheme.ends_with("lanes") && !row.of_links) continue;
      add_case(scheme + "/" + row.name, [scheme, run = row.run] { run(scheme); });
    }
  }
  return true;
}

}  // namespace telegrad::test
