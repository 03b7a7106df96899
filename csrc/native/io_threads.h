// The engine that works everywhere: threads that pread and pwrite, a piece at a time.
#pragma once
#include <thread>

#include "file_transfer.h"

namespace pyops {

class ThreadEngine : public Engine {
public:
    explicit ThreadEngine(int threads) {
        for (int i = 0; i < threads; ++i) threads_.emplace_back([this] { run(); });
    }
    ~ThreadEngine() override {
        {
            std::lock_guard<std::mutex> lock(mutex_);
            stopping_ = true;
        }
        more_.notify_all();
        for (std::thread& thread : threads_) thread.join();
    }
    const char* name() const override { return "threads"; }

protected:
    void wake() override { more_.notify_all(); }

private:
    void run() {
        std::unique_ptr<BounceBuffer> bounce;
        for (;;) {
            std::unique_lock<std::mutex> lock(mutex_);
            more_.wait(lock, [this] { return stopping_ || !queue_.empty(); });
            if (queue_.empty()) return;
            Piece piece = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            int error = 0;
            std::string why;
            if (piece.bounced) {
                if (!bounce) bounce = std::make_unique<BounceBuffer>();
                piece.bounce = bounce->get();
                piece.fill_bounce();
            }
            int64_t answer = 0;
            do {
                const auto place = static_cast<off_t>(piece.offset + piece.done);
                const auto left = static_cast<size_t>(piece.left());
                answer = piece.write() ? pwrite(piece.fd(), piece.at(), left, place)
                                       : pread(piece.fd(), piece.at(), left, place);
            } while (!piece.advance(answer < 0 ? -errno : answer, &error, &why));
            if (piece.bounce && !error) piece.empty_bounce();
            piece.request->piece_done(error, why);
        }
    }

    std::condition_variable more_;
    std::vector<std::thread> threads_;
};

}  // namespace pyops
