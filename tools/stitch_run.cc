// stitch-run -n N ./app args...: starts N processes of one program on this host. help_text() has
// the details.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "diagnose.h"
#include "launcher.h"
#include "run_options.h"
#include "stitch/base/standard_descriptors.h"

int main(int argc, char** argv) {
  constexpr int kUsageStatus = 2;
  constexpr int kInternalStatus = 125;
  try {
    stitch::base::open_standard_descriptors();
    const std::vector<std::string> arguments(argv + 1, argv + argc);
    if (stitch_run::asks_for_diagnosis(arguments)) return stitch_run::diagnose(arguments);
    stitch_run::RunOptions options = stitch_run::parse_options(arguments);
    if (options.help) {
      std::fputs(stitch_run::help_text().c_str(), stdout);
      return 0;
    }
    if (options.version) {
      std::puts("stitch-run " STITCH_VERSION);
      return 0;
    }
    return stitch_run::Launcher(std::move(options)).run();
  } catch (const stitch_run::UsageError& error) {
    std::fprintf(stderr, "stitch-run: %s\n", error.what());
    return kUsageStatus;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "stitch-run: %s\n", error.what());
    return kInternalStatus;
  }
}
