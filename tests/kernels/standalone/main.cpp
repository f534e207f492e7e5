// Runs every check that is linked in, or those named, under three orders of a block's threads. Exit code 1 when one
// fails; `--list` prints their names.

#include <algorithm>

#include "check.h"

int main(int num_arguments, char** arguments) {
  const std::vector<std::string> wanted(arguments + 1, arguments + num_arguments);
  int num_failed = 0;
  for (const auto& check : standalone::checks()) {
    if (wanted == std::vector<std::string>{"--list"}) {
      std::printf("%s\n", check.name.c_str());
      continue;
    }
    if (!wanted.empty() && std::find(wanted.begin(), wanted.end(), check.name) == wanted.end()) {
      continue;
    }
    for (const unsigned order : {0u, 1u, 2u}) {
      cuda_on_cpu::set_thread_order(order);
      try {
        check.run();
        std::printf("ok %s, order %u\n", check.name.c_str(), order);
      } catch (const std::exception& error) {
        std::printf("FAILED %s, order %u: %s\n", check.name.c_str(), order, error.what());
        ++num_failed;
      }
      std::fflush(stdout);
    }
  }
  return num_failed == 0 ? 0 : 1;
}
