#include "support/command_line.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>

namespace {

constexpr std::array<const char*, 5> kOptimizers{"sgd", "adam", "adamw", "adagrad", "rmsprop"};

constexpr const char* kHelp =
    "parameter_server: trains a classifier on Fashion-MNIST with one parameter server and several "
    "trainers.\n"
    "  stitch-run -n 3 parameter_server [options]     one server, two trainers\n\n"
    "  --workers N         trainers; one process less than stitch-run's -n starts\n"
    "  --epochs N          passes over the 60,000 images, shared by the trainers (3)\n"
    "  --optimizer NAME    sgd, adam, adamw, adagrad, rmsprop (adam)\n"
    "  --learning-rate R   its highest rate (the optimizer's usual one)\n"
    "  --hidden N          width of the hidden layer (128)\n"
    "  --batch N           images a step (64)\n"
    "  --data FOLDER       where the four gzipped data files are "
    "(/usr/share/datasets/fashion-mnist)\n"
    "  --device NAME       where parameters and images are: cpu, cuda, cuda:1 (cpu)\n"
    "  --checkpoint FOLDER saves model and optimizer there every 100 steps\n"
    "  --resume            goes on from that checkpoint, with the other options as before\n"
    "  --out FILE          the picture of the loss (loss.svg)\n"
    "  --help\n";

template <class Number>
Number number(const std::string& option, const std::string& text, Number least) {
  Number value{};
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (error != std::errc() || end != text.data() + text.size() || value < least) {
    throw std::invalid_argument(option + " is \"" + text + "\"; it takes a number from " +
                                std::to_string(least) + " on");
  }
  return value;
}

std::string optimizer(const std::string& text) {
  if (std::find(kOptimizers.begin(), kOptimizers.end(), text) != kOptimizers.end()) return text;
  std::string known;
  for (const auto* name : kOptimizers) known += (known.empty() ? "" : ", ") + std::string(name);
  throw std::invalid_argument("--optimizer is \"" + text + "\"; known are " + known);
}

}  // namespace

CommandLine parse_command_line(int argc, char** argv) {
  CommandLine line;
  TrainingPlan& plan = line.plan;
  plan.data = "/usr/share/datasets/fashion-mnist";
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    if (option == "--help" || option == "-h") {
      std::fputs(kHelp, stdout);
      std::exit(0);
    }
    if (option == "--resume") {
      line.resume = true;
      continue;
    }
    std::string value;
    if (const auto equals = option.find('='); equals != std::string::npos) {
      value = option.substr(equals + 1);
      option.resize(equals);
    } else if (i + 1 < argc) {
      value = argv[++i];
    } else {
      throw std::invalid_argument("option " + option + " needs a value; see --help");
    }
    if (option == "--data") {
      plan.data = value;
    } else if (option == "--device") {
      plan.device = value;
    } else if (option == "--checkpoint") {
      plan.checkpoint = value;
    } else if (option == "--out") {
      line.out = value;
    } else if (option == "--workers") {
      line.workers = number(option, value, 1);
    } else if (option == "--epochs") {
      plan.epochs = number(option, value, 1);
    } else if (option == "--hidden") {
      line.hidden = number<std::int64_t>(option, value, 1);
    } else if (option == "--batch") {
      plan.batch = number<std::int64_t>(option, value, 1);
    } else if (option == "--learning-rate") {
      plan.learning_rate = number(option, value, 0.0);
    } else if (option == "--optimizer") {
      plan.optimizer = optimizer(value);
    } else {
      throw std::invalid_argument("option " + option + " is unknown; see --help");
    }
  }
  if (line.resume && plan.checkpoint.empty())
    throw std::invalid_argument("--resume needs --checkpoint FOLDER");
  plan.steps = (std::int64_t{60'000} * plan.epochs + plan.batch - 1) / plan.batch;
  return line;
}
