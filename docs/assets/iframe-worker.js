// Browsers start no workers for pages that are opened as files. This runs the script of one in a hidden frame
// instead, so that the search works without a server.
(() => {
  if (location.protocol !== "file:") return;
  const head = `<script>
    postMessage = parent.postMessage.bind(parent);
    importScripts = (...urls) => urls.reduce((before, url) => before.then(() => new Promise((done, failed) => {
      const script = document.createElement("script");
      script.src = url;
      script.onload = () => done();
      script.onerror = failed;
      document.body.appendChild(script);
    })), Promise.resolve());
  <\/script>`;
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.onmessage = null;
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      document.body.appendChild(this.frame);
      this.ready = new Promise((done) => { this.frame.onload = done; });
      this.receive = (event) => {
        if (event.source !== this.frame.contentWindow) return;
        this.dispatchEvent(new MessageEvent("message", { data: event.data }));
        if (this.onmessage) this.onmessage(event);
      };
      window.addEventListener("message", this.receive);
      const page = this.frame.contentDocument;
      page.open();
      page.write(`<html><body>${head}<script src="${url}"><\/script></body></html>`);
      page.close();
    }

    postMessage(data) {
      this.ready.then(() => {
        const there = this.frame.contentWindow;
        there.dispatchEvent(new there.MessageEvent("message", { data }));
      });
    }

    terminate() {
      window.removeEventListener("message", this.receive);
      this.frame.remove();
    }
  };
})();
