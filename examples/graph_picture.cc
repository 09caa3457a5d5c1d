// Draws the autograd graph of a loss over three workers, with what its backward pass did.
//   stitch-run -n 3 graph_picture [FILE.svg]
#include <spawn.h>
#include <stitch/stitch.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

namespace autograd = stitch::dist_autograd;

// The layer of each worker.
class Layer {
 public:
  Layer(std::int64_t in, std::int64_t out)
      : weight_(torch::full({in, out}, 0.1, torch::requires_grad())),
        bias_(torch::zeros({out}, torch::requires_grad())) {}
  torch::Tensor forward(const torch::Tensor& x) {
    return torch::tanh(torch::matmul(x, weight_) + bias_);
  }

 private:
  torch::Tensor weight_, bias_;
};

// Runs Graphviz. The text of what went wrong, or nothing.
std::string draw(const std::string& dot_file, const std::string& svg_file) {
  std::vector<std::string> words{"dot", "-Tsvg", dot_file, "-o", svg_file};
  std::vector<char*> arguments;
  for (std::string& word : words) arguments.push_back(word.data());
  arguments.push_back(nullptr);
  pid_t child = 0;
  const int error = ::posix_spawnp(&child, "dot", nullptr, nullptr, arguments.data(), environ);
  if (error == ENOENT) return "dot is not installed (Debian package graphviz)";
  if (error != 0) return std::string("cannot run dot: ") + std::strerror(error);
  int status = 0;
  while (::waitpid(child, &status, 0) < 0 && errno == EINTR) {
  }
  if (!WIFEXITED(status) || WEXITSTATUS(status) == 127)
    return "dot is not installed (Debian package graphviz)";
  return WEXITSTATUS(status) == 0 ? "" : "dot failed";
}

int main(int argc, char** argv) {
  auto self = stitch::init();
  if (self.rank() != 0) return 0;  // the others serve until all workers leave

  const std::string svg = argc > 1 ? argv[1] : "graph.svg";
  const std::string dot = svg.substr(0, svg.rfind(".svg")) + ".dot";

  const auto encoder = stitch::remote<Layer>("worker1", 8, 16);
  const auto decoder = stitch::remote<Layer>("worker2", 16, 8);
  autograd::Context context;
  const auto input = torch::ones({32, 8}) * torch::full({8}, 0.5, torch::requires_grad());
  const auto code = encoder.rpc_sync<&Layer::forward>(input);
  const auto output = decoder.rpc_sync<&Layer::forward>(code);
  decoder.rpc_sync<&Layer::forward>(code * 2);  // not used by the loss: grey in the picture
  const auto loss = (output - input).square().mean();
  context.backward({loss}, {.retain_graph = true});

  std::ofstream(dot) << context.graph_dot({loss});
  const std::string problem = draw(dot, svg);
  if (problem.empty()) {
    std::printf("drew %s\n", svg.c_str());
  } else {
    std::printf("%s; the graph is in %s: dot -Tsvg %s -o %s draws it\n", problem.c_str(),
                dot.c_str(), dot.c_str(), svg.c_str());
  }
}
