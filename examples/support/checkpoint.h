#pragma once

#include <stitch/stitch.h>

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

// A folder with a remote module and its optimizer: the module as <name>.safetensors, the optimizer
// in a folder of its own. Thread contract: one thread at a time; no step may run meanwhile.
class Checkpoint {
 public:
  explicit Checkpoint(std::filesystem::path folder) : folder_(std::move(folder)) {}

  template <class M>
  void add(const std::string& name, const stitch::RemoteModule<M>& module) {
    const auto file = folder_ / (name + ".safetensors");
    parts_.push_back({[=] { stitch::save(file, module.state_dict()); },
                      [=] { module.load_state_dict(stitch::load(file)); }});
  }
  template <class O>
  void add(const std::string& name, stitch::optim::DistributedOptimizer<O> optimizer) {
    const auto folder = folder_ / name;
    parts_.push_back({[=] { optimizer.save(folder); }, [=]() mutable { optimizer.load(folder); }});
  }

  // Writes the parts in the order in which they were added.
  void save() const {
    std::filesystem::create_directories(folder_);
    for (const auto& part : parts_) part.save();
  }
  // Throws stitch::Error for a part that is missing or damaged.
  void load() const {
    for (const auto& part : parts_) part.load();
  }

 private:
  struct Part {
    std::function<void()> save;
    std::function<void()> load;
  };
  const std::filesystem::path folder_;
  std::vector<Part> parts_;
};
