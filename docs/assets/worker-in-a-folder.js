// Search in a site that is read from a folder. Browsers start no Worker for a page of file://, so there the script of one
// runs in a hidden frame: what the page posts arrives there as a message, and what the frame posts arrives here as one.
// The search asks for the name IFrameWorker, to know that it runs in a frame.
(() => {
  if (location.protocol !== "file:") return;
  class IFrameWorker extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      document.body.append(frame);
      this.inner = frame.contentWindow;
      this.inner.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.inner.importScripts = async (...urls) => { for (const each of urls) await this.load(each); };
      this.ready = this.load(url);
    }
    load(url) {
      return new Promise((done, fail) => {
        const script = this.inner.document.createElement("script");
        Object.assign(script, { src: url, onload: done, onerror: () => fail(new Error(`cannot load ${url}`)) });
        this.inner.document.body.append(script);
      });
    }
    postMessage(data) {
      this.ready.then(() => this.inner.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {
      this.inner.frameElement.remove();
    }
  }
  window.IFrameWorker = window.Worker = IFrameWorker;
})();
