// Asking the server. Errors carry the server's own words.

export class ApiError extends Error {
  /** @param isAbsent the run does not have it (yet), which is no fault */
  constructor(message, isAbsent) {
    super(message);
    this.isAbsent = isAbsent;
  }
}

export async function get(path, parameters = {}, signal = undefined) {
  const query = new URLSearchParams();
  for (const [name, value] of Object.entries(parameters)) {
    if (value !== null && value !== undefined && value !== "") query.set(name, value);
  }
  const text = query.toString();
  const response = await fetch(`/api/${path}${text ? `?${text}` : ""}`, { signal });
  const answer = await response.json().catch(() => ({ error: `the viewer answered ${response.status}` }));
  if (!response.ok) throw new ApiError(answer.error || `the viewer answered ${response.status}`, response.status === 404);
  return answer;
}

/** Runs only the newest of several asynchronous jobs to its end: older ones are cancelled. */
export class Latest {
  #controller = null;

  async run(job) {
    this.#controller?.abort();
    const controller = (this.#controller = new AbortController());
    try {
      return await job(controller.signal);
    } catch (error) {
      if (controller.signal.aborted) return undefined;
      throw error;
    }
  }

  stop() { this.#controller?.abort(); }
}
