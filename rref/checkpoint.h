#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

#include "stitch/rref/rref.h"

namespace stitch {

// Values of a program in a checkpoint, beside its tensors.
using CheckpointValue = std::variant<bool, std::int64_t, double, std::string, std::vector<double>>;
using CheckpointValues = std::map<std::string, CheckpointValue>;  // by name

namespace rref {

class OwnerPart;

// A module or an optimizer, when its checkpoint is saved or loaded.
struct CheckpointPart {
  std::string type;          // a part of another type is refused
  CheckpointValues options;  // now
  std::vector<RRef<OwnerPart>> owners;
  // Throws Error(invalid_argument) for options that do not fit. Null: there are none.
  std::function<void(const CheckpointValues&)> check;
  // Called when all owners have taken the loaded tensors.
  std::function<void(const CheckpointValues&)> loaded;
};

// Links the functions of owners into every program that includes this header.
int register_owner_part();
inline const int kOwnerPart = register_owner_part();

// The tensors, of whichever owners.
[[nodiscard]] CheckpointPart checkpoint_of(
    const std::vector<std::pair<std::string, RRef<at::Tensor>>>& tensors);

}  // namespace rref

// Of a Checkpoint.
struct CheckpointOptions {
  // Of the checkpoint: letters, digits, '-' and '_', at most 64. Checkpoints of different names in
  // one folder have nothing to do with one another.
  std::string name = "checkpoint";
  std::size_t keep = 1;                               // how many saves stay, at least 1
  std::optional<std::chrono::nanoseconds> timeout{};  // of each message; none: the worker's
};

// Modules, optimizers and values of a program, saved together and loaded together. Files are those
// of the worker that saves or loads (docs/checkpoints.md); no path is sent. Errors are
// Error(invalid_argument), and name the file, unless a worker fails. Thread contract: one thread;
// no two checkpoints of one name in one folder may be saved at the same time.
class Checkpoint {
 public:
  // Touches no file. Throws Error(invalid_argument) for a name that is not one, and for `keep` 0.
  explicit Checkpoint(std::filesystem::path folder, CheckpointOptions options = {});

  // A RemoteModule or a DistributedOptimizer as the part of that name (letters as in the
  // checkpoint's). Groups that an optimizer gets later are in it, too.
  template <class T>
  void add(const std::string& name, const T& part) {
    add_part(name, [part] { return part.checkpoint_part(); });
  }
  // Named tensors of any owners.
  void add(const std::string& name, std::vector<std::pair<std::string, RRef<at::Tensor>>> tensors) {
    add_part(name, [tensors = std::move(tensors)] { return rref::checkpoint_of(tensors); });
  }
  // Values of the program beside them: its step, seed, configuration. Replaced by load().
  CheckpointValues values;

  // Writes all parts, from all owners in parallel, in pieces of 4 MiB. The former save stays until
  // this one is complete and on the disk. A parameter of at most a piece is saved as one step left
  // it; a larger one may mix steps that run meanwhile. Throws for a name that other parts have.
  void save() const;
  // Loads the newest save, onto any owners: all or nothing. Parts that were not added are left
  // alone. Steps must not run meanwhile. Throws for a part, a parameter, a type or a shape that is
  // missing, unknown or different, before any owner changes.
  void load();

 private:
  using MakePart = std::function<rref::CheckpointPart()>;
  void add_part(const std::string& name, MakePart make);

  std::filesystem::path folder_;
  CheckpointOptions options_;
  std::map<std::string, MakePart> parts_;
};

}  // namespace stitch
