// Index builders that loop over every document or sample. Each has a NumPy form with the same bits in
// index_kernels.py, where the meaning of arguments and results is written down.

// GCC fuses a product and a sum into one instruction on some machines (aarch64), which would change the last bit.
#if defined(__GNUC__) && !defined(__clang__)
#pragma GCC optimize("fp-contract=off")
#else
#pragma STDC FP_CONTRACT OFF
#endif

#include <pybind11/numpy.h>
#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <limits>
#include <stdexcept>
#include <utility>
#include <vector>

namespace py = pybind11;

template <typename T>
using Array = py::array_t<T, py::array::c_style | py::array::forcecast>;

// One walk along the documents in reading order; `place` is the number of tokens before the current document.
template <typename Entry>
py::array_t<Entry> build_sample_idx(const Array<int32_t>& sizes, const Array<int32_t>& document_index,
                                    int64_t sequence_length, int64_t num_samples, int num_extra_tokens) {
  py::array_t<Entry> result({static_cast<py::ssize_t>(num_samples + 1), static_cast<py::ssize_t>(2)});
  Entry* out = result.mutable_data();
  const int32_t* size = sizes.data();
  const int32_t* document = document_index.data();
  const int64_t num_documents = document_index.size();
  int64_t row = 0;
  int64_t place = 0;
  for (int64_t i = 0; i <= num_samples; ++i) {
    const int64_t target = i * sequence_length;
    // With an extra token the boundary token itself must lie in the document; without, its end will do.
    while (row < num_documents) {
      const int64_t end = place + size[document[row]];
      if (num_extra_tokens > 0 ? target < end : target <= end) break;
      place = end;
      ++row;
    }
    if (row == num_documents) throw std::invalid_argument("the documents hold fewer tokens than the samples need");
    *out++ = static_cast<Entry>(row);
    *out++ = static_cast<Entry>(target - place);
  }
  return result;
}

// Fill one greedy order; `limits` are the numbers of samples that each dataset can give.
static std::pair<py::array_t<int16_t>, py::array_t<int64_t>> greedy_order(const double* weights,
                                                                          const std::vector<int64_t>& limits,
                                                                          int64_t total) {
  py::array_t<int16_t> dataset_index(total);
  py::array_t<int64_t> sample_index(total);
  int16_t* dataset_out = dataset_index.mutable_data();
  int64_t* sample_out = sample_index.mutable_data();
  std::vector<int64_t> counts(limits.size(), 0);
  for (int64_t i = 0; i < total; ++i) {
    const double place = std::max(static_cast<double>(i), 1.0);
    double largest = -std::numeric_limits<double>::infinity();
    size_t chosen = 0;
    for (size_t k = 0; k < limits.size(); ++k) {
      if (counts[k] >= limits[k]) continue;
      // The product is rounded before the subtraction, as in NumPy: see the pragma above.
      const double share = weights[k] * place;
      const double lag = share - static_cast<double>(counts[k]);
      if (lag > largest) {
        largest = lag;
        chosen = k;
      }
    }
    dataset_out[i] = static_cast<int16_t>(chosen);
    sample_out[i] = counts[chosen]++;
  }
  return {dataset_index, sample_index};
}

static std::pair<py::array_t<int16_t>, py::array_t<int64_t>> build_blending_indices(const Array<double>& weights,
                                                                                    int64_t total) {
  const std::vector<int64_t> limits(weights.size(), std::numeric_limits<int64_t>::max());
  return greedy_order(weights.data(), limits, total);
}

static std::pair<py::array_t<int16_t>, py::array_t<int64_t>> build_exhaustive_blending_indices(
    const Array<int64_t>& sizes) {
  const std::vector<int64_t> limits(sizes.data(), sizes.data() + sizes.size());
  int64_t total = 0;
  for (const int64_t limit : limits) total += limit;
  std::vector<double> weights;
  for (const int64_t limit : limits) weights.push_back(static_cast<double>(limit) / static_cast<double>(total));
  return greedy_order(weights.data(), limits, total);
}

PYBIND11_MODULE(helpers_cpp, module) {
  module.doc() = "Index builders of megatron.core.datasets; use them through index_kernels.py.";
  module.def("build_sample_idx_int32", &build_sample_idx<int32_t>, "Sample boundaries, int32 [n + 1, 2].");
  module.def("build_sample_idx_int64", &build_sample_idx<int64_t>, "Sample boundaries, int64 [n + 1, 2].");
  module.def("build_blending_indices", &build_blending_indices, "Greedy order by weight.");
  module.def("build_exhaustive_blending_indices", &build_exhaustive_blending_indices, "Greedy order, all samples.");
}
