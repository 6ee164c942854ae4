// Forks while another thread uses a link: the child must find no lock taken.
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <thread>

#include "tests/links.h"
#include "tests/resumable_pair.h"

namespace telegrad::test {
namespace {

/// Forks repeatedly while another thread repeats `busy`; `check` runs in the children.
void fork_during(const std::function<void()>& busy, const std::function<void()>& check) {
  std::atomic<bool> enough = false;
  std::thread other([&] {
    while (!enough) busy();
  });
  for (int i = 0; i < times(200); ++i) {
    const pid_t child = ::fork();
    CHECK(child >= 0);
    if (child == 0) {
      ::alarm(20);
      check();
      ::_exit(0);
    }
    int status = 0;
    CHECK_EQ(::waitpid(child, &status, 0), child);
    CHECK_EQ(status, 0);
  }
  enough = true;
  other.join();
}

CASE(a_child_closes_a_link_that_another_thread_uses) {
  Pair p;
  const ResumableLink& link = *p.ends[0].link;
  fork_during([&] { link.fd(); },
              [&] {
                for (const int fd : link.descriptors()) ::close(fd);
              });
}

CASE(a_child_releases_leased_memory) {
  Ends ends("inproc");
  auto held = ends.a->lease(64 << 10);
  CHECK(held);
  fork_during([&] { ends.a->lease(1 << 20); }, [&] { held.reset(); });
}

}  // namespace
}  // namespace telegrad::test
