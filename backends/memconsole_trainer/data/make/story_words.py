"""The words and sentences of generated stories."""

from __future__ import annotations

from typing import NamedTuple


class Trouble(NamedTuple):
    """The mishap of a story, how a friend helps, how it ends and the lesson."""

    happens: str
    help: str
    end: str
    lesson: str


_GIRLS = (
    "Anna", "Bella", "Clara", "Daisy", "Emma", "Flora", "Grace", "Hanna", "Ida", "Julia", "Kate",
    "Lily", "Mia", "Nora", "Olga", "Polly", "Rosa", "Sara", "Tilda", "Wendy",
)  # fmt: skip
_BOYS = (
    "Adam", "Ben", "Carl", "David", "Eric", "Felix", "George", "Henry", "Ivan", "Jack", "Karl",
    "Leo", "Max", "Noah", "Oscar", "Paul", "Robin", "Sam", "Tom", "Will",
)  # fmt: skip
HEROES = (
    *((name, "she", "her", "her") for name in _GIRLS),
    *((name, "he", "him", "his") for name in _BOYS),
)
"""Name, subject, object and possessive."""
KINDS = ("little", "brave", "shy", "clever", "cheerful", "curious", "quiet", "stubborn")
FRIENDS = (
    "Bubbles", "Clover", "Dusty", "Fern", "Ginger", "Hazel", "Juniper", "Maple", "Misty",
    "Nutmeg", "Pebble", "Pepper", "Pip", "Rusty", "Snowy", "Thistle",
)  # fmt: skip
ANIMALS = (
    "badger", "bear", "beaver", "cat", "crow", "deer", "dog", "donkey", "duck", "fox", "frog",
    "goat", "goose", "hare", "hedgehog", "horse", "mole", "mouse", "pig", "pony", "rabbit",
    "robin", "sheep", "squirrel",
)  # fmt: skip
PLACES = (
    "old mill", "big lake", "dark forest", "green hill", "long bridge", "empty barn",
    "quiet harbour", "market square", "railway station", "apple orchard", "stone tower",
    "school yard", "river bank", "town garden", "sandy beach", "village church",
)  # fmt: skip
COLOURS = (
    "red", "blue", "green", "yellow", "purple", "silver", "golden", "white", "brown", "striped",
    "spotted", "shiny",
)  # fmt: skip
THINGS = (
    "ball", "kite", "boat", "hat", "scarf", "drum", "lamp", "basket", "book", "whistle", "mirror",
    "bell", "cup", "doll", "key", "wagon", "ring", "map", "flute", "umbrella",
)  # fmt: skip
WEATHERS = ("sunny", "rainy", "windy", "foggy", "snowy", "cloudy", "frosty", "stormy")
HOBBIES = (
    "to sing", "to draw", "to climb trees", "to count the stars", "to bake bread", "to run",
    "to tell jokes", "to collect stones", "to dance", "to read", "to fish", "to plant flowers",
)  # fmt: skip
TROUBLES = (
    Trouble("fell into the water", "swam out and pulled it ashore", "dripped but was whole",
            "even cold water is warm with a friend"),
    Trouble("got stuck high in a tree", "climbed up and shook the branch", "came down with leaves on it",
            "two can reach higher than one"),
    Trouble("broke in two pieces", "brought glue and held the pieces", "looked as good as before",
            "what is broken can be mended"),
    Trouble("rolled down a deep hole", "dug until the earth gave way", "was dusty but safe",
            "patience moves more than strength"),
    Trouble("was taken by a big bird", "called the bird and offered it some bread", "was dropped on soft grass",
            "a kind word opens many doors"),
    Trouble("got lost in the crowd", "followed its trail from door to door", "lay under the last bench",
            "who looks twice finds once"),
    Trouble("sank into the mud", "laid down planks and pulled with a rope", "had to be washed three times",
            "dirty hands can do clean work"),
    Trouble("was left behind on the way", "ran all the way back before dark", "waited where it had been put down",
            "haste forgets what love remembers"),
    Trouble("was locked in a shed", "found the spare key under a pot", "stood behind the door",
            "there is always another way in"),
    Trouble("blew away with the wind", "chased it over three fences", "hung on the fourth fence",
            "the wind tires before a friend does"),
)  # fmt: skip
SENTENCES = (
    (
        "Once upon a time there was a {kind} child named {hero}.",
        "There once lived a {kind} child called {hero}.",
        "This is the story of {hero}, who was a {kind} child.",
        "In a small town lived {hero}, a {kind} child.",
    ),
    (
        " More than anything {hero} loved {hobby}.",
        " {He} liked {hobby} from morning till night.",
        " Everyone knew that {hero} loved {hobby}.",
        " {His} favourite game was {hobby}.",
    ),
    (
        " One {weather} day {he} went to the {place}.",
        " On a {weather} morning {hero} walked to the {place}.",
        " One day, when it was {weather}, {he} visited the {place}.",
        " It was a {weather} day when {his} mother took {him} to the {place}.",
    ),
    (
        " {He} carried {his} {colour} {thing}, which was a gift from {his} grandmother.",
        " {His} {colour} {thing} went with {him}, as it always did.",
        " With {him} {he} had the {colour} {thing} that {he} had got for {his} birthday.",
        " In {his} arms was the {colour} {thing}, {his} dearest treasure.",
    ),
    (
        " Suddenly the {thing} {wrong}.",
        " But near the {place} the {colour} {thing} {wrong}.",
        " Then something bad happened: the {thing} {wrong}.",
        " {hero} looked away for a moment, and the {thing} {wrong}.",
    ),
    (
        " {hero} sat down and cried.",
        " {He} was very sad and did not know what to do.",
        " \"Oh no, my {thing}!\" cried {hero}.",
        " Tears ran down {his} face.",
    ),
    (
        " A {animal} named {friend} came by and asked, \"Why are you sad, {hero}?\"",
        " {friend} the {animal} heard {him} and said, \"Can I help you, {hero}?\"",
        " Just then {hero} met a {animal} whose name was {friend}.",
        " \"Do not worry,\" said {friend}, a {animal} from the {place}.",
    ),
    (
        " {hero} told {friend} that the {colour} {thing} {wrong}.",
        " \"My {thing} {wrong},\" said {hero}.",
        " \"It is my {colour} {thing},\" {he} said. \"It {wrong}!\"",
        " {He} pointed and said that the {thing} {wrong}.",
    ),
    (
        " So the {animal} {help}, and the {thing} {end}.",
        " {friend} {help}. At last the {colour} {thing} {end}.",
        " The good {animal} {help}, and soon the {thing} {end}.",
        " At once {friend} {help}. The {thing} {end}, and {hero} laughed.",
    ),
    (
        " {hero} hugged {friend} and learned that {lesson}.",
        " From that day {hero} and {friend} the {animal} were friends, and both knew that {lesson}.",
        " \"Thank you, {friend}!\" said {hero}. {He} never forgot that {lesson}.",
        " They went home from the {place} together. \"You see,\" said {friend}, \"{lesson}.\"",
    ),
)  # fmt: skip
"""The forms of each sentence of a story."""
