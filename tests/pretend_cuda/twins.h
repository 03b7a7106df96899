// The CPU tensors that stand for CUDA tensors while an op runs, over the same memory.
#pragma once
#include <ATen/ATen.h>

#include <functional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "runtime.h"

namespace {

// Of one call of an op: which CPU tensor stands for which CUDA tensor.
class Twins {
public:
    at::Tensor twin(const at::Tensor& t) {
        if (!t.defined() || !t.is_cuda()) return t;
        auto found = twins_.find(t.unsafeGetTensorImpl());
        if (found != twins_.end()) return found->second.second;
        at::Tensor made;
        if (t.layout() == c10::kSparse) {
            made = at::_sparse_coo_tensor_unsafe(twin(t._indices()), twin(t._values()), t.sizes(),
                                                 t.options().device(CPU));
        } else {
            auto* original = t.storage().unsafeGetStorageImpl();
            auto& storage = storages_[original];
            if (!storage.second) {
                storage.first = t.storage();
                storage.second = c10::Storage(
                    c10::Storage::use_byte_size_t{}, original->nbytes(),
                    c10::DataPtr(
                        original->mutable_data(),
                        new c10::Storage(t.storage()),  // an asynchronous collective may outlive t
                        [](void* kept) { delete static_cast<c10::Storage*>(kept); }, CPU),
                    c10::GetAllocator(DeviceType::CPU), true);
                originals_[storage.second.unsafeGetStorageImpl()] = original;
            }
            made = at::detail::make_tensor<c10::TensorImpl>(
                c10::Storage(storage.second), c10::DispatchKeySet(DispatchKey::CPU), t.dtype());
            made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                              t.storage_offset());
            if (t.is_conj()) made._set_conj(true);
            if (t.is_neg()) made._set_neg(true);
            if (t.unsafeGetTensorImpl()->is_wrapped_number())
                made.unsafeGetTensorImpl()->set_wrapped_number(true);
        }
        twins_.emplace(t.unsafeGetTensorImpl(), std::make_pair(t, made));
        back_[made.unsafeGetTensorImpl()] = t;
        return made;
    }

    // What an op did to its operands' shapes and memory (out=, resize_) happens to the originals.
    void settle() {
        for (auto& [_, pair] : storages_) {
            auto *original = pair.first.unsafeGetStorageImpl(),
                 *copy = pair.second.unsafeGetStorageImpl();
            if (copy->data() == original->data() && copy->nbytes() == original->nbytes()) continue;
            auto grown = device_memory.allocate(copy->nbytes());
            std::memcpy(grown.get(), copy->data(), copy->nbytes());
            original->set_data_ptr_noswap(std::move(grown));
            original->set_nbytes(copy->nbytes());
        }
        for (auto& [impl, pair] : twins_) {
            auto& [t, made] = pair;
            if (t.layout() != c10::kStrided) continue;
            if (made.sizes() != t.sizes() || made.strides() != t.strides() ||
                made.storage_offset() != t.storage_offset())
                impl->set_sizes_and_strides(made.sizes(), made.strides(), made.storage_offset());
        }
    }

    at::Tensor labelled(const at::Tensor& t) {
        if (!t.defined() || !t.is_cpu()) return t;
        if (auto found = back_.find(t.unsafeGetTensorImpl()); found != back_.end())
            return found->second;
        if (t.layout() == c10::kSparse) {
            auto made = at::_sparse_coo_tensor_unsafe(labelled(t._indices()), labelled(t._values()),
                                                      t.sizes(), t.options().device(CUDA));
            return made._coalesced_(t.is_coalesced());
        }
        auto* own = t.storage().unsafeGetStorageImpl();
        c10::Storage storage;
        if (auto found = originals_.find(own); found != originals_.end()) {
            storage = storages_.at(found->second).first;
        } else {  // new memory: the CUDA storage keeps the CPU one alive
            auto& kept = fresh_[own];
            if (!kept) {
                held += int64_t(own->nbytes());
                int64_t now = held, most = peak;
                while (now > most && !peak.compare_exchange_weak(most, now)) {
                }
                auto* keeper = new std::pair<c10::Storage, int64_t>(t.storage(), own->nbytes());
                kept = c10::Storage(c10::Storage::use_byte_size_t{}, own->nbytes(),
                                    c10::DataPtr(
                                        own->mutable_data(), keeper,
                                        [](void* p) {
                                            auto* keeper =
                                                static_cast<std::pair<c10::Storage, int64_t>*>(p);
                                            held -= keeper->second;
                                            delete keeper;
                                        },
                                        CUDA),
                                    &device_memory, true);
            }
            storage = kept;
        }
        auto made = at::detail::make_tensor<c10::TensorImpl>(
            std::move(storage), c10::DispatchKeySet(DispatchKey::CUDA), t.dtype());
        made.unsafeGetTensorImpl()->set_sizes_and_strides(t.sizes(), t.strides(),
                                                          t.storage_offset());
        if (t.is_conj()) made._set_conj(true);
        if (t.is_neg()) made._set_neg(true);
        back_[t.unsafeGetTensorImpl()] = made;
        alive_.push_back(t);
        return made;
    }

private:
    std::unordered_map<c10::TensorImpl*, std::pair<at::Tensor, at::Tensor>> twins_;
    std::unordered_map<c10::TensorImpl*, at::Tensor> back_;
    std::unordered_map<c10::StorageImpl*, std::pair<c10::Storage, c10::Storage>> storages_;
    std::unordered_map<c10::StorageImpl*, c10::StorageImpl*> originals_;
    std::unordered_map<c10::StorageImpl*, c10::Storage> fresh_;
    std::vector<at::Tensor> alive_;
};

// A value of an op's schema with each of its tensors replaced.
IValue mapped(const IValue& value, const std::function<at::Tensor(const at::Tensor&)>& to) {
    if (value.isTensor()) return to(value.toTensor());
    if (value.isTensorList()) {
        c10::List<at::Tensor> out;
        for (const at::Tensor& t : value.toTensorVector()) out.push_back(to(t));
        return out;
    }
    if (value.isOptionalTensorList()) {
        c10::List<std::optional<at::Tensor>> out;
        for (const auto& item : value.toOptionalTensorVector())
            out.push_back(item.has_value() ? std::optional<at::Tensor>(to(*item)) : std::nullopt);
        return out;
    }
    if (value.isList()) {
        c10::List<IValue> list = value.toList();
        c10::impl::GenericList out(list.elementType());
        bool changed = false;
        for (const IValue& item : list) {
            changed |= item.isTensor() || item.isList();
            out.push_back(mapped(item, to));
        }
        return changed ? IValue(out) : value;
    }
    return value;
}

}  // namespace
