#include "tests/support/process_world.h"

namespace stitch::testing {

ProcessWorld::ProcessWorld(int size, const std::vector<std::string>& command,
                           const std::vector<std::string>& variables, std::chrono::seconds limit) {
  for (int rank = 0; rank < size; ++rank) {
    std::vector<std::string> words{
        "env", "RANK=" + std::to_string(rank), "WORLD_SIZE=" + std::to_string(size),
        "STITCH_INIT_METHOD=file://" + (folder_.path() / "store").string()};
    words.insert(words.end(), variables.begin(), variables.end());
    words.insert(words.end(), command.begin(), command.end());
    workers_.push_back(std::make_unique<RunningCommand>(words, limit));
  }
}

}  // namespace stitch::testing
