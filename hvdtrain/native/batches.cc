// The dataset operation HvdtrainBatches: splits blocks of uint8 images and their labels
// into batches, and scales the images to [0, 1].
//
// Equal to `map` and `flat_map` with these steps, but each image is read once, and no
// function of TensorFlow runs for a batch.

#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "tensorflow/core/framework/common_shape_fns.h"
#include "tensorflow/core/framework/dataset.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/tensor_util.h"

namespace hvdtrain {
namespace {

using tensorflow::OpKernelConstruction;
using tensorflow::OpKernelContext;
using tensorflow::Tensor;
using tensorflow::data::DatasetBase;
using tensorflow::data::DatasetIterator;
using tensorflow::data::IteratorBase;
using tensorflow::data::IteratorContext;
using tensorflow::data::SerializationContext;

using Types = tensorflow::DataTypeVector;
using Shapes = std::vector<tensorflow::PartialTensorShape>;

// The library is compiled for any processor of the architecture: the wider vectors of
// this one are chosen when it is loaded.
#if defined(__x86_64__)
__attribute__((target_clones("avx512f", "avx2", "default")))
#endif
void Scale(const uint8_t* pixels, int64_t count, float* output) {
  for (int64_t i = 0; i < count; ++i) output[i] = pixels[i] / 255.0f;
}

class Batches : public DatasetBase {
 public:
  Batches(OpKernelContext* context, const DatasetBase* blocks, Types types,
          Shapes shapes)
      : DatasetBase(tensorflow::data::DatasetContext(context)),
        blocks_(blocks),
        types_(std::move(types)),
        shapes_(std::move(shapes)) {
    blocks_->Ref();
  }
  ~Batches() override { blocks_->Unref(); }

  const Types& output_dtypes() const override { return types_; }
  const Shapes& output_shapes() const override { return shapes_; }
  std::string DebugString() const override { return "HvdtrainBatches"; }

  absl::Status InputDatasets(std::vector<const DatasetBase*>* inputs) const override {
    inputs->push_back(blocks_);
    return absl::OkStatus();
  }

  absl::Status CheckExternalState() const override {
    return blocks_->CheckExternalState();
  }

  std::unique_ptr<IteratorBase> MakeIteratorInternal(
      const std::string& prefix) const override {
    return std::make_unique<Iterator>(Iterator::Params{this, prefix + "::Batches"});
  }

 protected:
  absl::Status AsGraphDefInternal(SerializationContext* context,
                                  DatasetGraphDefBuilder* builder,
                                  tensorflow::Node** output) const override {
    tensorflow::Node* blocks = nullptr;
    TF_RETURN_IF_ERROR(builder->AddInputDataset(context, blocks_, &blocks));
    return builder->AddDataset(this, {blocks}, output);
  }

 private:
  class Iterator : public DatasetIterator<Batches> {
   public:
    using DatasetIterator<Batches>::DatasetIterator;

    absl::Status Initialize(IteratorContext* context) override {
      return dataset()->blocks_->MakeIterator(context, this, prefix(), &blocks_);
    }

   protected:
    absl::Status GetNextInternal(IteratorContext* context, std::vector<Tensor>* output,
                                 bool* is_end) override {
      std::lock_guard<std::mutex> lock(mutex_);
      *is_end = false;
      while (block_.empty() || next_ == block_[0].dim_size(0)) {
        next_ = 0;
        block_.clear();
        TF_RETURN_IF_ERROR(blocks_->GetNext(context, &block_, is_end));
        if (*is_end) return absl::OkStatus();
      }
      // Only `SubSlice`, which copies nothing; it need not be aligned.
      const Tensor pixels = block_[0].SubSlice(next_);
      Tensor images(context->allocator({}), tensorflow::DT_FLOAT, pixels.shape());
      Scale(pixels.unaligned_flat<uint8_t>().data(), pixels.NumElements(),
            images.flat<float>().data());
      output->push_back(std::move(images));
      output->push_back(tensorflow::tensor::DeepCopy(block_[1].SubSlice(next_)));
      ++next_;
      return absl::OkStatus();
    }

    // A training resumes at a step, by the arguments of its dataset.
    absl::Status SaveInternal(SerializationContext*,
                              tensorflow::data::IteratorStateWriter*) override {
      return absl::UnimplementedError("HvdtrainBatches cannot be saved");
    }
    absl::Status RestoreInternal(IteratorContext*,
                                 tensorflow::data::IteratorStateReader*) override {
      return absl::UnimplementedError("HvdtrainBatches cannot be restored");
    }

   private:
    std::mutex mutex_;
    std::unique_ptr<IteratorBase> blocks_;
    std::vector<Tensor> block_;
    int64_t next_ = 0;
  };

  const DatasetBase* const blocks_;
  const Types types_;
  const Shapes shapes_;
};

class BatchesOp : public tensorflow::data::UnaryDatasetOpKernel {
 public:
  explicit BatchesOp(OpKernelConstruction* context) : UnaryDatasetOpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("output_types", &types_));
    OP_REQUIRES_OK(context, context->GetAttr("output_shapes", &shapes_));
  }

 protected:
  void MakeDataset(OpKernelContext* context, DatasetBase* blocks,
                   DatasetBase** output) override {
    *output = new Batches(context, blocks, types_, shapes_);
  }

 private:
  Types types_;
  Shapes shapes_;
};

// Inputs and attributes have the names that `DatasetBase` looks for.
REGISTER_OP("HvdtrainBatches")
    .Input("input_dataset: variant")
    .Output("handle: variant")
    .Attr("output_types: list(type) >= 1")
    .Attr("output_shapes: list(shape) >= 1")
    .SetShapeFn(tensorflow::shape_inference::ScalarShape);

REGISTER_KERNEL_BUILDER(Name("HvdtrainBatches").Device(tensorflow::DEVICE_CPU),
                        BatchesOp);

}  // namespace
}  // namespace hvdtrain
