// stitch-run -n N ./app args...: starts N processes of one program on this host. help_text() has
// the details.
#include <cstdio>
#include <exception>
#include <string>
#include <vector>

#include "launcher.h"
#include "run_options.h"

int main(int argc, char** argv) {
  constexpr int kUsageStatus = 2;
  constexpr int kInternalStatus = 125;
  try {
    stitch_run::RunOptions options =
        stitch_run::parse_options(std::vector<std::string>(argv + 1, argv + argc));
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
