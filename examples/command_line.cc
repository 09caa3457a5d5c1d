#include "command_line.h"

#include <algorithm>
#include <charconv>
#include <stdexcept>
#include <string_view>

#include "training_server.h"

namespace {

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

std::string joined_optimizers() {
  std::string names;
  for (const auto& name : optimizer_names()) names += (names.empty() ? "" : ", ") + name;
  return names;
}

}  // namespace

CommandLine parse_command_line(int argc, char** argv) {
  CommandLine line;
  for (int i = 1; i < argc; ++i) {
    std::string option = argv[i];
    if (option == "--help" || option == "-h") {
      line.help = true;
      return line;
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
      line.data = value;
    } else if (option == "--device") {
      line.device = value;
    } else if (option == "--out") {
      line.out = value;
    } else if (option == "--workers") {
      line.workers = number(option, value, 1);
    } else if (option == "--epochs") {
      line.epochs = number(option, value, 1);
    } else if (option == "--hidden") {
      line.hidden = number<std::int64_t>(option, value, 1);
    } else if (option == "--batch") {
      line.batch = number<std::int64_t>(option, value, 1);
    } else if (option == "--learning-rate") {
      line.learning_rate = number(option, value, 0.0);
    } else if (option == "--optimizer") {
      if (std::find(optimizer_names().begin(), optimizer_names().end(), value) ==
          optimizer_names().end()) {
        throw std::invalid_argument("--optimizer is \"" + value + "\"; known are " +
                                    joined_optimizers());
      }
      line.optimizer = value;
    } else {
      throw std::invalid_argument("option " + option + " is unknown; see --help");
    }
  }
  return line;
}

std::string help_text() {
  return "parameter_server: trains a classifier on Fashion-MNIST with one parameter server and "
         "several trainers.\n"
         "  stitch-run -n 3 parameter_server [options]     one server, two trainers\n\n"
         "  --workers N         trainers; one process less than stitch-run's -n starts\n"
         "  --epochs N          passes over the 60,000 images, shared by the trainers (3)\n"
         "  --optimizer NAME    " +
         joined_optimizers() +
         " (adam)\n"
         "  --learning-rate R   of the optimizer (its usual one)\n"
         "  --hidden N          width of the hidden layer (128)\n"
         "  --batch N           images a step (64)\n"
         "  --data FOLDER       where the four gzipped data files are "
         "(/usr/share/datasets/fashion-mnist)\n"
         "  --device NAME       where parameters and images are: cpu, cuda, cuda:1 (cpu)\n"
         "  --out FILE          the picture of the loss (loss.svg)\n"
         "  --help\n";
}
