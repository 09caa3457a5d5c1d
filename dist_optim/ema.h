#pragma once

#include <memory>
#include <vector>

#include "stitch/dist_optim/steps.h"

namespace stitch::optim {

// Exponential moving averages of parameters, each on the owner of its parameter and of its sizes,
// in float32 for one of half precision. Belongs to the worker that made it; copies are the same,
// and the end of the last one frees the averages. Thread contract: one thread at a time; no step
// and no pass may run meanwhile.
class Ema {
 public:
  // Begins with the parameters as they are, as RemoteModule::named_parameters() has them. A tensor
  // with two names counts once, by the first. Waits. Throws Error(invalid_argument) for a decay not
  // between 0 and 1, remote_exception for a tensor that is not of a floating-point type.
  Ema(const std::vector<NamedParameter>& parameters, double decay);

  // After a step: average = decay * average + (1 - decay) * parameter. Waits. Throws
  // Error(remote_exception) while the parameters have the values of averages.
  void update();
  // Gives the parameters the values of their averages, for evaluation; the next call gives them
  // their own back, to the last bit. In between they must not be trained: versions do not change.
  // Waits. When an owner fails others have swapped: another call swaps them back.
  void swap();
  // The averages, by the names of their parameters: to read, to save, and to write what was saved.
  [[nodiscard]] std::vector<NamedParameter> averages() const;

 private:
  struct State;
  std::shared_ptr<State> state_;
};

}  // namespace stitch::optim
