// Which characters of a text came from which token.
//
// A token's own text is not always what the text shows: a character may be made of several tokens,
// special tokens are left out, and of a chat its tags. So the text counts, and tokens are matched
// to it as both come in. Whatever happens, the pieces together are the text.

const BROKEN = "\ufffd"; // stands in a token's text for bytes that are no whole character
const MANY = 64; // tokens that are looked at to get in step again
const PATIENCE = 200; // characters that may wait for their tokens

export class Aligner {
  #tokens = []; // that are not placed
  #parts = []; // {place, text} that is not shown

  // show(place, text, token): token is null for text of unknown origin; text "" for a token that
  // the text does not show.
  constructor(show) {
    this.show = show;
  }

  addTokens(tokens) {
    this.#tokens.push(...tokens);
  }

  addText(place, text) {
    if (text) this.#parts.push({place, text});
    this.#match(false);
  }

  // All tokens that wait belong here, as their own texts.
  takeTokens(place) {
    for (const token of this.#tokens.splice(0)) this.show(place, token.text, token);
  }

  finish(place) {
    this.#match(true);
    this.#showText(this.#waiting().length, null);
    for (const token of this.#tokens.splice(0)) this.show(place, "", token);
  }

  #waiting() {
    return this.#parts.map((part) => part.text).join("");
  }

  #match(final) {
    for (let text = this.#waiting(); text && this.#tokens.length; text = this.#waiting()) {
      const head = this.#tokens[0];
      if (text.startsWith(head.text) && head.text) {
        this.#showText(head.text.length, this.#tokens.shift());
        continue;
      }
      const found = this.#find(text, final);
      if (found) {
        this.#skip(found.tokens, found.characters);
        this.#showText(found.length, this.#tokens.shift());
      } else if (final) {
        this.#skip(1, text.length);
      } else {
        if (text.length > PATIENCE) this.#showText(text.length, null);
        return;
      }
    }
  }

  // The next token whose text is there, after others that are not: {tokens, characters} to skip.
  #find(text, final) {
    let broken = 0; // characters that the skipped tokens may stand for
    for (const [tokens, token] of this.#tokens.slice(0, MANY).entries()) {
      if (token.text.includes(BROKEN)) {
        broken += token.text.split(BROKEN).length - 1;
        continue;
      }
      for (const form of new Set([token.text, token.text.trimStart(), token.text.trim()])) {
        if (!form.trim()) continue;
        const at = text.indexOf(form);
        if (at >= 0 && at <= broken) return {tokens, characters: at, length: form.length};
        if (broken || !form.startsWith(text)) continue;
        return final ? {tokens, characters: 0, length: text.length} : null; // more of it comes
      }
    }
    return null;
  }

  // The first of the skipped tokens gets the text that they made together.
  #skip(tokens, characters) {
    for (const token of this.#tokens.splice(0, tokens)) {
      if (characters) this.#showText(characters, token);
      else this.show(this.#parts[0]?.place, "", token);
      characters = 0;
    }
  }

  #showText(length, token) {
    while (length > 0 && this.#parts.length) {
      const part = this.#parts[0];
      const piece = part.text.slice(0, length);
      this.show(part.place, piece, token);
      part.text = part.text.slice(length);
      length -= piece.length;
      if (!part.text) this.#parts.shift();
    }
  }
}
