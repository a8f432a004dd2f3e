// Runs a library that CompiledModule.save wrote, with tvm-ffi and TVM's runtime alone.
//
//   ./run MODEL.so [function=NAME] [SIZE=NUMBER ...] INPUT.bin ... OUTPUT_PREFIX
//
// Inputs are raw values in the order of the signature, which MODEL.so.json has; symbolic sizes are
// given by name, and so is the function of a model of several. Outputs become OUTPUT_PREFIX0.bin, OUTPUT_PREFIX1.bin ... The times that loading and
// a second call take go to standard output.

#include <tvm/ffi/container/array.h>
#include <tvm/ffi/container/map.h>
#include <tvm/ffi/container/tensor.h>
#include <tvm/ffi/extra/json.h>
#include <tvm/ffi/extra/module.h>
#include <tvm/ffi/function.h>

#include <chrono>
#include <cstdlib>
#include <fstream>
#include <iostream>
#include <iterator>
#include <map>
#include <string>
#include <vector>

namespace ffi = tvm::ffi;
namespace json = tvm::ffi::json;

constexpr int kPooled = 2;  // the allocator of TVM's virtual machine that keeps memory for later calls
constexpr size_t kAlignment = 64;

// Memory for a tensor on the host.
struct HostMemory {
  void AllocData(DLTensor* tensor) {
    size_t size = (ffi::GetDataSize(*tensor) + kAlignment) / kAlignment * kAlignment;
    tensor->data = std::aligned_alloc(kAlignment, size);
  }
  void FreeData(DLTensor* tensor) { std::free(tensor->data); }
};

std::string ReadFile(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw std::runtime_error("cannot read " + path);
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

// A tensor of an entry of the signature, with the values of a file.
ffi::Tensor ReadInput(const json::Object& spec, const std::map<std::string, int64_t>& sizes,
                      const std::string& path) {
  std::vector<int64_t> shape;
  for (const json::Value& extent : spec["shape"].cast<json::Array>()) {
    std::optional<ffi::String> symbol = extent.as<ffi::String>();
    shape.push_back(symbol ? sizes.at(*symbol) : extent.cast<int64_t>());
  }
  DLDataType dtype = ffi::StringToDLDataType(spec["dtype"].cast<ffi::String>());
  ffi::Tensor tensor =
      ffi::Tensor::FromNDAlloc(HostMemory(), ffi::Shape(shape), dtype, DLDevice{kDLCPU, 0});
  std::string values = ReadFile(path);
  if (values.size() != ffi::GetDataSize(*tensor.GetDLTensorPtr())) {
    throw std::runtime_error(path + " has another size than " +
                             std::string(spec["name"].cast<ffi::String>()));
  }
  std::copy(values.begin(), values.end(), static_cast<char*>(tensor.data_ptr()));
  return tensor;
}

// The tensors of a result, which may be a tuple of them.
void Flatten(const ffi::Any& value, std::vector<ffi::Tensor>* found) {
  if (auto tensor = value.as<ffi::Tensor>()) {
    found->push_back(*tensor);
  } else {
    for (const ffi::Any& item : value.cast<ffi::Array<ffi::Any>>()) Flatten(item, found);
  }
}

double MillisecondsSince(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin).count();
}

int Run(int argc, char** argv) {
  std::vector<std::string> words(argv + 1, argv + argc);
  if (words.size() < 2) {
    std::cerr << "usage: run MODEL.so [function=NAME] [SIZE=NUMBER ...] INPUT.bin ... PREFIX\n";
    return 2;
  }
  const std::string library = words.front(), prefix = words.back();
  std::string name;
  std::map<std::string, int64_t> sizes;
  std::vector<std::string> files;
  for (size_t i = 1; i + 1 < words.size(); ++i) {
    size_t equals = words[i].find('=');
    if (equals == std::string::npos) {
      files.push_back(words[i]);
    } else if (words[i].substr(0, equals) == "function") {
      name = words[i].substr(equals + 1);
    } else {
      sizes[words[i].substr(0, equals)] = std::stoll(words[i].substr(equals + 1));
    }
  }

  // The library holds the virtual machine's code, the kernels and the weights.
  auto begin = std::chrono::steady_clock::now();
  ffi::Module executable = ffi::Module::LoadFromFile(library);
  ffi::Module vm = executable->GetFunction("vm_load_executable").value()().cast<ffi::Module>();
  vm->GetFunction("vm_initialization").value()(static_cast<int>(kDLCPU), 0, kPooled);
  std::cout << "load_ms " << MillisecondsSince(begin) << "\n";

  // The file beside it says what the function is called, and what it takes.
  json::Object facts = json::Parse(ReadFile(library + ".json")).cast<json::Object>();
  if (!name.empty()) facts = facts["functions"].cast<json::Object>()[name].cast<json::Object>();
  ffi::Function function =
      vm->GetFunction(facts["function"].cast<ffi::String>()).value();
  json::Array signature = facts["signature"].cast<json::Array>();
  if (signature.size() != files.size()) {
    throw std::runtime_error("the model takes " + std::to_string(signature.size()) + " inputs");
  }
  std::vector<ffi::Tensor> inputs;
  for (size_t i = 0; i < files.size(); ++i) {
    inputs.push_back(ReadInput(signature[i].cast<json::Object>(), sizes, files[i]));
  }
  std::vector<ffi::AnyView> arguments(inputs.begin(), inputs.end());

  ffi::Any result;
  function.CallPacked(arguments.data(), arguments.size(), &result);
  begin = std::chrono::steady_clock::now();
  function.CallPacked(arguments.data(), arguments.size(), &result);
  std::cout << "call_ms " << MillisecondsSince(begin) << "\n";

  std::vector<ffi::Tensor> outputs;
  Flatten(result, &outputs);
  for (size_t i = 0; i < outputs.size(); ++i) {
    std::ofstream file(prefix + std::to_string(i) + ".bin", std::ios::binary);
    file.write(static_cast<const char*>(outputs[i].data_ptr()),
               ffi::GetDataSize(*outputs[i].GetDLTensorPtr()));
  }
  return 0;
}

int main(int argc, char** argv) {
  try {
    return Run(argc, argv);
  } catch (const std::exception& error) {
    std::cerr << "run: " << error.what() << "\n";
    return 1;
  }
}
